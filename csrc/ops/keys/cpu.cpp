// CPU key: checks, allocates, packs, and runs the kernels of the selected instruction set on torch's threads.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "../../core/arena.h"
#include "../../core/philox.h"
#include "../../core/sequence.h"
#include "../../cpu/int8.h"
#include "../../cpu/select.h"
#include "../../cpu/why_not.h"
#include "../declarations/implement.h"
#include "../declarations/library.h"
#include "../operators.h"
#include "on_cpu.h"
#include "plan.h"
#include "torch_threads.h"

namespace flash_attn_ext {
namespace {

// The kernels of a call, and the number of products of two tiles that they compute for each tile of the scores.
struct ForParams {
  static auto kernels(const AttentionParams&) { return &cpu::Kernels::forward; }
  static auto kernels(const BackwardParams&) { return &cpu::Kernels::backward; }
  static auto kernels(const JvpParams&) { return &cpu::Kernels::jvp; }
  static auto kernels(const DoubleBackwardParams&) { return &cpu::Kernels::double_backward; }
  static auto kernels(const WeightsParams&) { return &cpu::Kernels::weights; }
  static auto kernels(const IndexedParams&) { return &cpu::Kernels::indexed; }
  static auto kernels(const IndexedBackwardParams&) { return &cpu::Kernels::indexed_backward; }
  static constexpr double products(const AttentionParams&) { return 2.0; }
  static constexpr double products(const BackwardParams&) { return 5.0; }
  static constexpr double products(const JvpParams&) { return 6.0; }
  static constexpr double products(const DoubleBackwardParams&) { return 10.0; }
  static constexpr double products(const WeightsParams&) { return 1.0; }
};

template <class Params>
const auto& kernels_of(const Params& params) {
  return cpu::active_kernels().*ForParams::kernels(params);
}
const auto& kernels_of(const Int8Params&) { return cpu::int8_kernels().forward; }

// The least rows and keys of a head: fewer take as long, because the kernels pad their vectors.
struct LeastSizes {
  int64_t rows, keys;
};
LeastSizes least_sizes(const AttentionParams&) { return {4, 16}; }
LeastSizes least_sizes(const BackwardParams&) { return {4, 16}; }
template <class Params>
LeastSizes least_sizes(const Params&) {
  return {16, 1};
}

// A small call runs on the calling thread: below about 5 us of work, waking other threads costs more than they save.
template <class Params>
cpu::Parallel threads_for(const Params& p) {
  constexpr double kSerialFlops = 5e5;
  const Sizes& z = p.sizes;
  const auto pairs_of = [&](const Sizes& own) {
    if (own.seqlen_q == 0 || own.seqlen_k == 0) return 0.0;
    const LeastSizes least = least_sizes(p);
    return double(std::max(own.seqlen_q, least.rows)) * std::max(own.seqlen_k, least.keys);
  };
  double pairs = p.varlen ? 0.0 : z.batch * pairs_of(z);
  for (int64_t b = 0; p.varlen && b < z.batch; ++b)
    pairs += pairs_of(of_sequence<AttentionParams>(p, b).sizes);
  const double flops = ForParams::products(p) * pairs * double(z.heads) * (z.head_dim + z.head_dim_v);
  const bool serial = flops < kSerialFlops || at::in_parallel_region();
  return {serial ? 1 : at::get_num_threads(), run_on_torch_threads};
}

// The scratch memory of one call. It is from torch's allocator. A small workspace is a buffer of the thread instead,
// because an allocation would take longer than the call. The stack is too small: some threads have 48 KiB.
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

  // The number of bytes that torch's allocator returns for a workspace of `bytes`.
  static int64_t allocated(size_t bytes) {
    return bytes <= kSmall ? 0 : static_cast<int64_t>(bytes + Arena::kAlignment);
  }

 private:
  static constexpr size_t kSmall = 256 * 1024;
  struct alignas(Arena::kAlignment) Small {
    char bytes[kSmall];
  };
  void* data_;
  at::Tensor large_;
};

template <class Params>
std::string refusal_of(const Params& params) {
  const char* reason = cpu::why_not(params);
  return reason ? std::string("flash_attn on CPU: ") + reason : std::string();
}

template <class Params>
void run(const Params& params) {
  TORCH_CHECK_NOT_IMPLEMENTED(!cpu::why_not(params), refusal_of(params));
  const auto& kernels = kernels_of(params);
  const cpu::Parallel parallel = threads_for(params);
  const Workspace workspace(kernels.workspace(params, parallel.threads));
  kernels.run(params, workspace.data(), parallel);
}

// Calls without scores. Kernels need at least one query row and one key; packed sequences with a sink need no key.

template <class Tensors>
bool has_scores(const Tensors& in) {
  return in.query.numel() != 0 && in.key.numel() != 0;
}
template <class Tensors>
bool packed_has_scores(const Tensors& in) {
  return in.query.numel() != 0 && (in.key.numel() != 0 || in.sink);
}
bool has_scores(const VarlenTensors& in) { return packed_has_scores(in); }
bool has_scores(const VarlenBackwardTensors& in) { return packed_has_scores(in); }
bool has_scores(const VarlenJvpTensors& in) { return packed_has_scores(in); }
bool has_scores(const VarlenDoubleBackwardTensors& in) { return packed_has_scores(in); }
bool has_scores(const VarlenFlexTensors& in) { return packed_has_scores(in); }
bool has_scores(const VarlenFlexBackwardTensors& in) { return packed_has_scores(in); }

// The sink of each row of lse; none: no sink.
OptionalTensor sink_of_rows(const AttentionTensors& in, const at::Tensor& lse) {
  return in.sink ? OptionalTensor(in.sink->unsqueeze(-1).expand_as(lse)) : std::nullopt;
}
OptionalTensor sink_of_rows(const AttentionJvpTensors& in, const at::Tensor& lse) {
  return sink_of_rows(in.forward(), lse);
}
OptionalTensor sink_of_rows(const Int8Tensors& in, const at::Tensor& lse) {
  return sink_of_rows(in.attention(), lse);
}
OptionalTensor sink_of_rows(const FlexTensors& in, const at::Tensor& lse) {
  return sink_of_rows(in.base(), lse);
}
OptionalTensor sink_of_rows(const CacheTensors& in, const at::Tensor& lse) {
  if (!in.sink) return std::nullopt;
  if (in.sink->dim() == 1) return in.sink->unsqueeze(1).expand_as(lse);
  return at::repeat_interleave(*in.sink, in.cu_seqlens_q.diff(), 0).t();
}
OptionalTensor sink_of_rows(const IndexedTensors& in, const at::Tensor& lse) {
  return sink_of_rows(in.attention(), lse);
}
OptionalTensor sink_of_rows(const CacheFlexTensors& in, const at::Tensor& lse) {
  return sink_of_rows(in.base(), lse);
}
// Packed sequences with a sink have scores.
OptionalTensor sink_of_rows(const VarlenTensors&, const at::Tensor&) { return std::nullopt; }
OptionalTensor sink_of_rows(const VarlenJvpTensors&, const at::Tensor&) { return std::nullopt; }
OptionalTensor sink_of_rows(const VarlenFlexTensors&, const at::Tensor&) { return std::nullopt; }

// The derivative of lse with respect to the sink: 1, and 0 for a sink of -inf, which is no sink.
at::Tensor where_sink(const at::Tensor& sink, const at::Tensor& derivative) {
  return at::where(at::eq(sink, -std::numeric_limits<double>::infinity()),
                   at::zeros({}, derivative.options()), derivative);
}

// out is 0. lse is the sink, or -inf.
template <class Tensors>
void write_without_scores(const Tensors& in, const AttentionResult& result) {
  result.out.zero_();
  if (const OptionalTensor sink = sink_of_rows(in, result.lse))
    result.lse.copy_(*sink);
  else
    result.lse.fill_(-std::numeric_limits<double>::infinity());
}

template <class Tensors>
void write_without_scores(const Tensors& in, const AttentionJvpResult& result) {
  write_without_scores(in, AttentionResult{result.out, result.lse});
  result.tangent_out.zero_();
  result.tangent_lse.zero_();
  if (in.sink && in.tangent_sink && result.lse.dim() == 3)  // dense
    result.tangent_lse.copy_(
        where_sink(*in.sink, *in.tangent_sink).unsqueeze(-1).expand_as(result.tangent_lse));
}

template <class Tensors>
void write_without_scores(const Tensors&, const Gradients& result) {
  result.with_members([](const auto&... grad) { ((grad.defined() ? void(grad.zero_()) : void()), ...); });
}
// Only lse depends on an input: on the sink.
void write_without_scores(const AttentionBackwardTensors& in, const Gradients& result) {
  write_without_scores<AttentionBackwardTensors>(in, result);
  if (!result.sink.defined() || !in.grad_lse) return;
  const at::Tensor per_head = in.grad_lse->sum(-1);
  result.sink.copy_(where_sink(*in.sink, result.sink.dim() == 1 ? per_head.sum(0) : per_head));
}

template <class Tensors>
void write_without_scores(const Tensors& in, const FlexGradients& result) {
  write_without_scores(in.base(), result.base());
  if (result.captured.defined()) result.captured.zero_();
}

void write_without_scores(const IndexedBackwardTensors& in, const Gradients& result) {
  write_without_scores(in.attention(), result);
}

void write_without_scores(const WeightsTensors&, const WeightsResult& result) { result.weights.zero_(); }

// Writes the result. The arguments are checked.
template <class Op>
void run_checked(const typename Op::Tensors& given, const typename Op::Options& options,
                 const typename Op::Result& result) {
  if (!has_scores(given)) return write_without_scores(given, result);
  pack_and_run<Op>(given, options, result, [](const Packed<Op>& packed) { run(packed.params); });
}

template <class Op>
typename Op::Result on_cpu(const typename Op::Tensors& given, const typename Op::Options& options) {
  return compute<Op>(given, options,
                     [&](const typename Op::Result& result) { run_checked<Op>(given, options, result); });
}

template <class Index>
void store_lengths(const AppendParams& p, const at::Tensor& lengths) {
  Index* data = lengths.mutable_data_ptr<Index>();
  for (int64_t b = 0; b < p.sizes.batch; ++b)
    data[b] = static_cast<Index>(p.cache_seqlens[b] + p.cu_seqlens_new[b + 1] - p.cu_seqlens_new[b]);
}

AppendResult append_on_cpu(const AppendTensors& given, const AppendOptions& options) {
  constexpr int64_t kSerialElements = 1 << 16;
  return compute<AppendToCache>(given, options, [&](const AppendResult& result) {
    const Packed<AppendToCache> packed = AppendToCache::pack(given, options, result);
    const AppendParams& p = packed.params;
    const int64_t elements = given.query.numel() + given.key.numel() + given.value.numel();
    const bool serial = elements < kSerialElements || at::in_parallel_region();
    cpu::active_kernels().append(p, {serial ? 1 : at::get_num_threads(), run_on_torch_threads});
    if (p.cache_seqlens.is_int64)
      store_lengths<int64_t>(p, result.lengths);
    else
      store_lengths<int32_t>(p, result.lengths);
  });
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

// Whether kernels run for these params: has_scores() of the call.
bool runs_kernel(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  if (!p.varlen) return z.batch * z.heads * z.seqlen_q * z.seqlen_k != 0;
  const bool is_cache = !p.varlen.cu_seqlens_k;
  const int64_t keys = is_cache ? p.varlen.cache.caches * z.seqlen_k : p.varlen.total_k;
  return z.heads * p.varlen.total_q != 0 && (keys != 0 || (p.sink && !is_cache));
}

template <class Params>
KernelChoice choose(const Params& params) {
  KernelChoice choice;
  if (!runs_kernel(params)) return choice;
  choice.refusal = refusal_of(params);
  if (!choice.refusal.empty()) return choice;
  choice.kernel = cpu::active_kernels().isa;
  choice.why_not = cpu::why_not_faster();
  const auto& kernels = kernels_of(params);
  choice.workspace_bytes = Workspace::allocated(kernels.workspace(params, threads_for(params).threads));
  return choice;
}

}  // namespace

void read_cache_on_cpu(const CacheTensors& given, const CacheOptions& options, const at::Tensor& out) {
  AttentionCache::check(given, options);
  check_contents(given, options);
  const at::ScalarType accumulators = given.query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor lse = at::empty({given.query.size(1), given.query.size(0)}, accumulators);
  run_checked<AttentionCache>(given, options, {out, lse});
}

AppendResult write_cache_on_cpu(const AppendTensors& given, const AppendOptions& options) {
  return append_on_cpu(given, options);
}

KernelChoice choose_on_cpu(const AttentionParams& params) { return choose(params); }
KernelChoice choose_on_cpu(const BackwardParams& params) { return choose(params); }
KernelChoice choose_on_cpu(const Int8Params& params) {
  KernelChoice choice = choose(params);
  if (choice.kernel.empty()) return choice;
  const std::string fastest = "avx512_vnni", active = choice.kernel;
  choice.kernel = cpu::int8_kernels().isa;
  choice.why_not.clear();
  if (choice.kernel != fastest)
    choice.why_not = {fastest + ": " +
                      (cpu::cpu_has_vnni() ? active + " is forced" : "this CPU cannot run it")};
  return choice;
}

int64_t decode_splits_on_cpu(const AttentionParams& params) {
  return cpu::active_kernels().decode_splits(params);
}

std::string why_not_decode_on_cpu() {
  return "decode: for at most " + std::to_string(cpu::active_kernels().decode_max_queries) +
         " queries, or 32 on long caches, or where num_splits or unified_max asks for it";
}

FA_LIBRARY_IMPL(CPU, m) {
  const auto register_operator = [&m](auto tag) {
    using Op = typename decltype(tag)::Op;
    implement<Op, on_cpu<Op>>(m);
  };
  for_each_operator(KernelOperators{}, register_operator);
  for_each_operator(CpuOperators{}, register_operator);
  implement<AppendToCache, append_on_cpu>(m);
  m.impl("dropout_mask", dropout_mask_cpu);
}

}  // namespace flash_attn_ext
