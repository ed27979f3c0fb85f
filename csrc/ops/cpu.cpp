// CPU key: check, allocate, pack, run the selected instruction set's kernels on torch's threads.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <limits>
#include <memory>

#include "../core/arena.h"
#include "../core/philox.h"
#include "../core/sequence.h"
#include "../cpu/select.h"
#include "../cpu/why_not.h"
#include "append.h"
#include "checks.h"
#include "flex/flex.h"
#include "outputs.h"
#include "pack_params.h"
#include "plan.h"
#include "weights.h"

namespace flash_attn_ext {
namespace {

void run_on_torch_threads(int threads, void (*worker)(void* context, int thread), void* context) {
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) worker(context, static_cast<int>(thread));
  });
}

// How many products of two tiles a pass makes of each tile of the scores.
constexpr double products_of(const AttentionParams&) { return 2.0; }
constexpr double products_of(const BackwardParams&) { return 5.0; }
constexpr double products_of(const JvpParams&) { return 6.0; }
constexpr double products_of(const DoubleBackwardParams&) { return 10.0; }
constexpr double products_of(const WeightsParams&) { return 1.0; }

// Small calls run on the calling thread: below about 10 us of work, waking others costs more than they save.
template <class Params>
cpu::Parallel threads_for(const Params& p) {
  constexpr double kSerialFlops = 1e6;
  const Sizes& z = p.sizes;
  double pairs = p.varlen ? 0.0 : double(z.batch) * z.seqlen_q * z.seqlen_k;
  for (int64_t b = 0; p.varlen && b < z.batch; ++b) {
    const Sizes own = of_sequence<AttentionParams>(p, b).sizes;
    pairs += double(own.seqlen_q) * own.seqlen_k;
  }
  const double flops = products_of(p) * pairs * double(z.heads) * (z.head_dim + z.head_dim_v);
  const bool serial = flops < kSerialFlops || at::in_parallel_region();
  return {serial ? 1 : at::get_num_threads(), run_on_torch_threads};
}

// Scratch for one call: from torch's allocator, or, where an allocation would take longer than the call, the
// thread's own. Not on the stack: threads may have as little as 48 KiB of it.
class Workspace {
 public:
  explicit Workspace(size_t bytes) {
    if (allocated(bytes) == 0) {
      static thread_local std::unique_ptr<Small> small;
      if (!small) small.reset(new Small);
      data_ = small->bytes;
      return;
    }
    large_ = at::empty({allocated(bytes)}, at::kByte);
    const auto address = reinterpret_cast<uintptr_t>(large_.mutable_data_ptr());
    const auto mask = static_cast<uintptr_t>(Arena::kAlignment - 1);
    data_ = reinterpret_cast<void*>((address + mask) & ~mask);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

  // What torch's allocator is asked for where kernels need `bytes`.
  static int64_t allocated(size_t bytes) {
    return bytes <= kSmall ? 0 : static_cast<int64_t>(bytes + Arena::kAlignment);
  }

 private:
  static constexpr size_t kSmall = 65536;
  struct alignas(Arena::kAlignment) Small {
    char bytes[kSmall];
  };
  void* data_;
  at::Tensor large_;
};

template <class Params>
using PassOf = cpu::Pass<Params> cpu::Kernels::*;

template <class Params>
std::string refusal_of(const Params& params) {
  const char* reason = cpu::why_not(params);
  return reason ? std::string("flash_attn on CPU: ") + reason : std::string();
}

template <class Params>
void run(PassOf<Params> of, const Params& params) {
  TORCH_CHECK_NOT_IMPLEMENTED(!cpu::why_not(params), refusal_of(params));
  const cpu::Pass<Params>& pass = cpu::active_kernels().*of;
  const cpu::Parallel parallel = threads_for(params);
  const Workspace workspace(pass.workspace(params, parallel.threads));
  pass.run(params, workspace.data(), parallel);
}

// Without keys a row sees its sink alone, or nothing. `lse` is (B, H, S_q).
AttentionResult without_keys(AttentionResult result, const OptionalTensor& sink = std::nullopt) {
  result.out.zero_();
  if (sink)
    result.lse.copy_(sink->unsqueeze(-1).expand_as(result.lse));
  else
    result.lse.fill_(-std::numeric_limits<double>::infinity());
  return result;
}

// The derivative of such a call's lse with respect to the sink: 1, and 0 where the sink is -inf, which is no sink.
at::Tensor where_sink(const at::Tensor& sink, const at::Tensor& derivative) {
  return at::where(at::eq(sink, -std::numeric_limits<double>::infinity()),
                   at::zeros({}, derivative.options()), derivative);
}

// The gradients of such a call: its lse depends on the sink, and nothing else depends on anything.
Gradients without_scores(Gradients result, const OptionalTensor& sink, const OptionalTensor& grad_lse) {
  std::apply([](auto&... grad) { ((grad.defined() ? void(grad.zero_()) : void()), ...); }, result.tie());
  if (!result.sink.defined() || !grad_lse) return result;
  const at::Tensor per_head = grad_lse->sum(-1);
  result.sink.copy_(where_sink(*sink, result.sink.dim() == 1 ? per_head.sum(0) : per_head));
  return result;
}

AttentionResult attention_cpu(const AttentionTensors& given, const AttentionOptions& options) {
  check_storages(given);
  check_attention(given, options);
  AttentionResult result = empty_result(given);
  auto& [out, lse] = result;
  if (lse.numel() == 0) return result;
  if (given.key.size(2) == 0) return without_keys(result, given.sink);

  const AttentionTensors tensors = to_kernel_layout(given);
  run(&cpu::Kernels::forward, pack_attention(tensors, out, lse, options));
  return result;
}

Gradients attention_backward_cpu(const AttentionBackwardTensors& given,
                                 const AttentionBackwardOptions& options) {
  check_storages(given);
  check_attention_backward(given, options);
  Gradients result = empty_gradients(given.forward(), GradMask(options.grad_mask));
  if (given.lse.numel() == 0 || given.key.size(2) == 0)
    return without_scores(result, given.sink, given.grad_lse);

  const PackedBackward packed = pack_backward(given, options, result, given.query.size(0));
  run(&cpu::Kernels::backward, packed.params);
  store_per_head_gradients(packed, result);
  return result;
}

AttentionJvpResult attention_jvp_cpu(const AttentionJvpTensors& given, const AttentionOptions& options) {
  check_storages(given);
  check_attention_jvp(given, options);
  const AttentionJvpResult result = empty_jvp_result(given.forward());
  if (result.lse.numel() == 0) return result;
  if (given.key.size(2) == 0) {
    without_keys({result.out, result.lse}, given.sink);
    result.tangent_out.zero_();
    result.tangent_lse.zero_();
    if (given.tangent_sink)
      result.tangent_lse.copy_(
          where_sink(*given.sink, *given.tangent_sink).unsqueeze(-1).expand_as(result.tangent_lse));
    return result;
  }
  run(&cpu::Kernels::jvp, pack_jvp(given, options, result).params);
  return result;
}

Gradients attention_double_backward_cpu(const AttentionDoubleBackwardTensors& given,
                                        const AttentionBackwardOptions& options) {
  check_storages(given);
  check_attention_double_backward(given, options);
  const Gradients result = empty_gradients(given.forward(), GradMask(options.grad_mask));
  if (given.lse.numel() == 0 || given.key.size(2) == 0)
    return without_scores(result, std::nullopt, std::nullopt);  // linear in what is left
  const PackedDoubleBackward packed = pack_double_backward(given, options, result, given.query.size(0));
  run(&cpu::Kernels::double_backward, packed.params);
  store_per_head_gradients(packed.backward, result);
  return result;
}

WeightsResult weights_cpu(const WeightsTensors& given, const WeightsOptions& options) {
  check_storages(given);
  check_weights(given, options);
  const at::Tensor weights = empty_weights(given);
  if (weights.numel() == 0) return {weights};
  run(&cpu::Kernels::weights, pack_weights(given, options, weights).params);
  return {weights};
}

Gradients weights_backward_cpu(const WeightsBackwardTensors& given, const WeightsBackwardOptions& options) {
  check_storages(given);
  check_weights_backward(given, options);
  const Gradients result = empty_gradients(given.forward().attention(), GradMask(options.grad_mask));
  if (given.lse.numel() == 0 || given.key.size(2) == 0)
    return without_scores(result, std::nullopt, std::nullopt);
  const PackedBackward packed = pack_weights_backward(given, options, result);
  run(&cpu::Kernels::backward, packed.params);
  store_per_head_gradients(packed, result);
  return result;
}

AttentionResult flex_cpu(const FlexTensors& given, const FlexOptions& options) {
  check_storages(given);
  check_flex(given, options);
  const AttentionTensors attention = given.attention();
  AttentionResult result = empty_result(attention);
  auto& [out, lse] = result;
  if (lse.numel() == 0) return result;
  if (given.key.size(2) == 0) return without_keys(result, given.sink);
  const UserFunctions functions = pack_functions(given, options);
  const AttentionTensors tensors = to_kernel_layout(attention);
  AttentionParams params = pack_attention(tensors, out, lse, options.attention());
  params.functions = &functions;
  run(&cpu::Kernels::forward, params);
  return result;
}

FlexGradients flex_backward_cpu(const FlexBackwardTensors& given, const FlexBackwardOptions& options) {
  check_storages(given);
  check_flex_backward(given, options);
  FlexGradients result = empty_flex_gradients(given, options);
  Gradients gradients = result.attention();
  if (given.lse.numel() == 0 || given.key.size(2) == 0) {
    result.set_attention(without_scores(gradients, given.sink, given.grad_lse));
    if (result.captured.defined()) result.captured.zero_();
    return result;
  }
  UserFunctions functions = pack_functions(given.forward(), options.forward());
  if (result.captured.defined()) {
    if (functions.captured_gradient)
      functions.dcaptured = result.captured.mutable_data_ptr();
    else
      result.captured.zero_();  // nothing reads them in a way that has a derivative
  }
  PackedBackward packed =
      pack_backward(given.attention(), options.attention(), gradients, given.query.size(0));
  packed.params.functions = &functions;
  run(&cpu::Kernels::backward, packed.params);
  store_per_head_gradients(packed, gradients);
  return result;
}

AttentionResult varlen_cpu(const VarlenTensors& given, const VarlenOptions& options) {
  check_storages(given);
  check_varlen(given, options);
  AttentionResult result = empty_varlen_result(given);
  if (result.lse.numel() == 0) return result;
  if (given.key.size(0) == 0 && !given.sink) return without_keys(result);
  run(&cpu::Kernels::forward, pack_varlen(given, options, result).params);
  return result;
}

AttentionJvpResult varlen_jvp_cpu(const VarlenJvpTensors& given, const VarlenOptions& options) {
  check_storages(given);
  check_varlen_jvp(given, options);
  const AttentionJvpResult result = empty_varlen_jvp_result(given.forward());
  if (result.lse.numel() == 0) return result;
  if (given.key.size(0) == 0 && !given.sink) {
    without_keys({result.out, result.lse});
    result.tangent_out.zero_();
    result.tangent_lse.zero_();
    return result;
  }
  run(&cpu::Kernels::jvp, pack_varlen_jvp(given, options, result).packed.params);
  return result;
}

Gradients varlen_double_backward_cpu(const VarlenDoubleBackwardTensors& given,
                                     const VarlenBackwardOptions& options) {
  check_storages(given);
  check_varlen_double_backward(given, options);
  const Gradients result = empty_varlen_gradients(given.forward(), GradMask(options.grad_mask));
  if (given.lse.numel() == 0 || (given.key.size(0) == 0 && !given.sink))
    return without_scores(result, std::nullopt, std::nullopt);
  const PackedVarlenDoubleBackward all = pack_varlen_double_backward(given, options, result);
  run(&cpu::Kernels::double_backward, all.packed.params);
  store_per_head_gradients(all.packed.backward, result);
  return result;
}

// A sink (H) or (B, H) for each row of packed queries, (H, T_q).
OptionalTensor sink_of_rows(const CacheTensors& in) {
  if (!in.sink) return std::nullopt;
  if (in.sink->dim() == 1) return in.sink->unsqueeze(1).expand({-1, in.query.size(0)});
  return at::repeat_interleave(*in.sink, in.cu_seqlens_q.diff(), 0).t();
}

AttentionResult cache_cpu(const CacheTensors& given, const CacheOptions& options) {
  check_storages(given);
  check_cache(given, options);
  AttentionResult result = empty_cache_result(given);
  if (result.lse.numel() == 0) return result;
  if (given.key.numel() == 0) {
    without_keys(result);
    if (const OptionalTensor sink = sink_of_rows(given)) result.lse.copy_(*sink);
    return result;
  }
  run(&cpu::Kernels::forward, pack_cache(given, options, result).params);
  return result;
}

Gradients varlen_backward_cpu(const VarlenBackwardTensors& given, const VarlenBackwardOptions& options) {
  check_storages(given);
  check_varlen_backward(given, options);
  Gradients result = empty_varlen_gradients(given.forward(), GradMask(options.grad_mask));
  if (given.lse.numel() == 0 || (given.key.size(0) == 0 && !given.sink))
    return without_scores(result, std::nullopt, std::nullopt);
  const PackedVarlenBackward all = pack_varlen_backward(given, options, result);
  run(&cpu::Kernels::backward, all.packed.params);
  store_per_head_gradients(all.packed, result);
  return result;
}

AppendResult append_cpu(const AppendTensors& given, const AppendOptions& options) {
  constexpr int64_t kSerialElements = 1 << 16;
  check_storages(given);
  check_append(given, options);
  const AppendResult result = empty_append_result(given);
  const PackedAppend packed = pack_append(given, options, result);
  const AppendParams& p = packed.params;
  const int64_t elements = given.query.numel() + given.key.numel() + given.value.numel();
  const bool serial = elements < kSerialElements || at::in_parallel_region();
  cpu::active_kernels().append(p, {serial ? 1 : at::get_num_threads(), run_on_torch_threads});
  const auto store_lengths = [&](auto* lengths) {
    for (int64_t b = 0; b < p.sizes.batch; ++b)
      lengths[b] = p.cache_seqlens[b] + p.cu_seqlens_new[b + 1] - p.cu_seqlens_new[b];
  };
  if (p.cache_seqlens.is_int64)
    store_lengths(result.lengths.mutable_data_ptr<int64_t>());
  else
    store_lengths(result.lengths.mutable_data_ptr<int32_t>());
  return result;
}

at::Tensor dropout_mask_cpu(const at::Tensor& rng_state, int64_t batch, int64_t heads, int64_t seqlen_q,
                            int64_t seqlen_k, double dropout_p, int64_t first_row) {
  check_dropout_mask(rng_state, {batch, heads, seqlen_q, seqlen_k}, dropout_p, first_row);
  check_storage("rng_state", rng_state);
  at::Tensor kept = at::empty({batch, heads, seqlen_q, seqlen_k}, at::kBool);
  const DropoutParams dropout = pack_dropout(rng_state, dropout_p);
  const PhiloxKey key = philox_key(dropout.rng_state[0], dropout.rng_state[1]);
  bool* data = kept.mutable_data_ptr<bool>();
  at::parallel_for(0, batch * heads * seqlen_q, 64, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t head = dropout.head(n / seqlen_q / heads, n / seqlen_q % heads, heads);
      const int64_t row = dropout.row(first_row + n % seqlen_q);
      for (int64_t j = 0; j < seqlen_k; ++j)
        data[n * seqlen_k + j] = dropout_keeps(key, dropout.threshold, head, row, dropout.col(j));
    }
  });
  return kept;
}

// Whether a call comes to its kernel: the functions above return before where it has nothing to compute.
bool runs_kernel(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  if (!p.varlen) return z.batch * z.heads * z.seqlen_q * z.seqlen_k != 0;
  const bool is_cache = !p.varlen.cu_seqlens_k;
  const int64_t keys = is_cache ? p.varlen.cache.caches * z.seqlen_k : p.varlen.total_k;
  return z.heads * p.varlen.total_q != 0 && (keys != 0 || (p.sink && !is_cache));
}

template <class Params>
KernelChoice choose(PassOf<Params> of, const Params& params) {
  KernelChoice choice;
  if (!runs_kernel(params)) return choice;
  choice.refusal = refusal_of(params);
  if (!choice.refusal.empty()) return choice;
  choice.kernel = cpu::active_kernels().isa;
  choice.why_not = cpu::why_not_faster();
  const size_t bytes = (cpu::active_kernels().*of).workspace(params, threads_for(params).threads);
  choice.workspace_bytes = Workspace::allocated(bytes);
  return choice;
}

}  // namespace

KernelChoice choose_on_cpu(const AttentionParams& params) { return choose(&cpu::Kernels::forward, params); }
KernelChoice choose_on_cpu(const BackwardParams& params) { return choose(&cpu::Kernels::backward, params); }

int64_t decode_splits_on_cpu(const AttentionParams& params) {
  return cpu::active_kernels().decode_splits(params);
}

std::string why_not_decode_on_cpu() {
  return "decode: for at most " + std::to_string(cpu::active_kernels().decode_max_queries) +
         " queries, or where num_splits or unified_max asks for it";
}

TORCH_LIBRARY_IMPL(flash_attn_ext, CPU, m) {
  implement<Attention, attention_cpu>(m);
  implement<AttentionBackward, attention_backward_cpu>(m);
  implement<AttentionVarlen, varlen_cpu>(m);
  implement<AttentionCache, cache_cpu>(m);
  implement<AttentionVarlenBackward, varlen_backward_cpu>(m);
  implement<AttentionVarlenJvp, varlen_jvp_cpu>(m);
  implement<AttentionVarlenDoubleBackward, varlen_double_backward_cpu>(m);
  implement<AppendToCache, append_cpu>(m);
  implement<AttentionJvp, attention_jvp_cpu>(m);
  implement<AttentionDoubleBackward, attention_double_backward_cpu>(m);
  implement<AttentionFlex, flex_cpu>(m);
  implement<AttentionFlexBackward, flex_backward_cpu>(m);
  implement<AttentionWeights, weights_cpu>(m);
  implement<AttentionWeightsBackward, weights_backward_cpu>(m);
  m.impl("dropout_mask", dropout_mask_cpu);
}

}  // namespace flash_attn_ext
