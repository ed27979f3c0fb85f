#include "plan.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "../../core/mask.h"
#include "../../core/sequence.h"
#include "../../core/splits.h"
#include "../operators.h"

namespace flash_attn_ext {
namespace {

// A tensor with the sizes, strides and dtype of `like` at `address`, for any device. Packing the params of a call reads no
// elements.
at::Tensor without_elements(const void* address, const at::Tensor& like) {
  return at::from_blob(const_cast<void*>(address), like.sizes(), like.strides(),
                       at::TensorOptions(like.scalar_type()));
}

// Stands for a tensor that the call would allocate. The address is aligned as an allocator aligns it.
at::Tensor not_allocated(const at::Tensor& like) {
  return like.defined() ? without_elements(reinterpret_cast<void*>(uintptr_t{1} << 20), like) : at::Tensor();
}

at::Tensor meta_like(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}

int64_t bytes_of(const at::Tensor& t) { return t.defined() ? static_cast<int64_t>(t.nbytes()) : 0; }

// The tensors of a call without their elements. Offsets, lengths and page tables keep their elements, on the CPU: the work
// of the call depends on them.
template <class Tensors>
struct Placeholders {
  Tensors given;             // on the Meta device
  Tensors laid_out;          // as kernels read them
  int64_t copied_bytes = 0;  // of the tensors that are copied into that layout
};

template <class Tensors>
Placeholders<Tensors> placeholders_of(const Tensors& tensors) {
  Placeholders<Tensors> placeholders;
  placeholders.given = tensors;
  const auto is_number = [](size_t n) { return Tensors::kRules[n].dtype == DtypeRule::kIndex; };
  size_t n = 0;
  for_each_tensor(placeholders.given, [&](const TensorRule&, auto& t) {
    if (tensor_or_null(t)) t = is_number(n) ? tensor_or_null(t)->cpu() : meta_like(*tensor_or_null(t));
    ++n;
  });
  placeholders.laid_out = to_kernel_layout(placeholders.given);
  n = 0;
  auto fill = [&](const auto& given, const auto& meta, auto& tensor) {
    const bool number = is_number(n++);
    if (!tensor_or_null(given)) return;
    const at::Tensor& r = *tensor_or_null(tensor);
    const bool copied = !r.is_same(*tensor_or_null(meta));
    if (copied) placeholders.copied_bytes += bytes_of(r);
    if (number) return;
    tensor = copied ? not_allocated(r) : without_elements(tensor_or_null(given)->const_data_ptr(), r);
  };
  tensors.with_members([&](const auto&... given) {
    placeholders.given.with_members([&](const auto&... meta) {
      placeholders.laid_out.with_members([&](auto&... tensor) { (fill(given, meta, tensor), ...); });
    });
  });
  return placeholders;
}

// The Meta device has no kernels: its plan has only the sizes of the results.
template <class Params>
KernelChoice choose(const Params& params, at::Device device) {
  if (device.is_cpu()) return choose_on_cpu(params);
  if constexpr (!std::is_same_v<Params, Int8Params>) {
    if (device.is_cuda()) return choose_on_cuda(params, device);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_meta(), "flash_attn: no kernel for device ", device,
                              "; allowed: cpu, cuda");
  return {};
}

template <class Params>
Plan plan_of(const Params& params, at::Device device) {
  Plan plan;
  plan.choice = choose(params, device);
  const int64_t sequences = params.varlen ? params.sizes.batch : 1;
  for (int64_t b = 0; b < sequences; ++b) {
    const AttentionParams p = of_sequence<AttentionParams>(params, b);
    plan.parts.push_back({p.sizes, p.band});
  }
  return plan;
}

bool has_scores(const Sizes& z) { return z.batch * z.heads * z.seqlen_q * z.seqlen_k != 0; }

Plan forward_plan(const AttentionParams& params, at::Device device, const AttentionResult& result,
                  int64_t copied_bytes, bool deterministic) {
  Plan plan = plan_of(params, device);
  plan.deterministic = deterministic;
  if (device.is_cpu() && !plan.choice.kernel.empty()) {
    bool any = false;
    for (size_t b = 0; b < plan.parts.size(); ++b) {
      if (!has_scores(plan.parts[b].sizes)) continue;
      plan.parts[b].decode_splits = decode_splits_on_cpu(of_sequence(params, static_cast<int64_t>(b)));
      any = any || plan.parts[b].decode_splits > 0;
    }
    if (!any) plan.choice.why_not.push_back(why_not_decode_on_cpu());
  }
  plan.bytes = {{"out", bytes_of(result.out)},
                {"lse", bytes_of(result.lse)},
                {"workspace", plan.choice.workspace_bytes},
                {"copies", copied_bytes}};
  return plan;
}

template <class Result>
Result not_allocated(Result result) {
  result.with_members([](auto&... t) { ((t = not_allocated(t)), ...); });
  return result;
}

// The tensors and options of a backward, from the tensors, results and options of its forward.
template <class Tensors, class Forward>
Tensors backward_tensors(const Forward& forward, const AttentionResult& result) {
  Tensors tensors;
  tensors.set_forward(forward);
  tensors.out = result.out;
  tensors.lse = result.lse;
  tensors.grad_out = tensors.out;
  return tensors;
}

template <class Options, class Forward, size_t n>
Options backward_options(const Forward& forward, const std::array<bool, n>& grad_mask) {
  Options options;
  options.set_forward(forward);
  options.grad_mask = grad_mask;
  return options;
}

inline const Gradients& base_of(const Gradients& gradients) { return gradients; }
inline Gradients base_of(const FlexGradients& gradients) { return gradients.base(); }
inline void add_captured(Plan&, const Gradients&) {}
inline void add_captured(Plan& plan, const FlexGradients& gradients) {
  plan.bytes.emplace_back("dcaptured", bytes_of(gradients.captured));
}

template <class Packed, class Tensors, class AnyGradients>
Plan backward_plan(const Packed& packed, const Tensors& given, const AnyGradients& all_gradients,
                   int64_t copied_bytes) {
  const Gradients& gradients = base_of(all_gradients);
  Plan plan = plan_of(packed.params, given.query.device());
  plan.deterministic = packed.params.deterministic;
#define FA_BYTES(name, ...) plan.bytes.emplace_back("d" #name, bytes_of(gradients.name));
  FA_DIFFERENTIABLE(FA_BYTES)
#undef FA_BYTES
  add_captured(plan, all_gradients);
  // The parts of each batch and head; and their sum, if one gradient serves all batches.
  int64_t per_head_bytes = 0;
#define FA_PER_HEAD_BYTES(name, ...)                        \
  if (const int64_t bytes = bytes_of(packed.per_head.name)) \
    per_head_bytes += given.name->dim() == 1 ? bytes + bytes / packed.params.sizes.batch : bytes;
  FA_PER_HEAD(FA_PER_HEAD_BYTES)
#undef FA_PER_HEAD_BYTES
  plan.bytes.emplace_back("workspace", plan.choice.workspace_bytes + per_head_bytes);
  plan.bytes.emplace_back("copies", copied_bytes);
  return plan;
}

// sum over i < count of floor((first + i * step) / divisor), for first, step >= 0, by Euclid's algorithm.
int64_t sum_of_quotients(int64_t count, int64_t first, int64_t step, int64_t divisor) {
  int64_t sum = 0;
  while (count > 0) {
    sum += count * (first / divisor) + count * (count - 1) / 2 * (step / divisor);
    first %= divisor;
    step %= divisor;
    const int64_t last = first + step * count;
    if (last < divisor) break;
    // The remaining sum counts lattice points under a line: count them by columns instead of rows.
    count = last / divisor;
    first = last % divisor;
    std::swap(step, divisor);
  }
  return sum;
}

// Counts the tiles block by block. Beyond kMostBlocks it is an estimate from that many blocks, so that explain returns at
// once for any length.
int64_t visible_tiles_of_chunks(const Sizes& z, const Band& band, int64_t block_q, int64_t block_k) {
  constexpr int64_t kMostBlocks = int64_t{1} << 22;
  const int64_t blocks = ceil_div(z.seqlen_q, block_q), step = ceil_div(blocks, kMostBlocks);
  int64_t tiles = 0;
  for (int64_t n = 0; n < blocks; n += step) {
    const int64_t end = std::min((n + 1) * block_q, z.seqlen_q);
    const Range seen = visible_keys(band, n * block_q, end, z.seqlen_k);
    if (seen.begin < seen.end)
      tiles += ((seen.end - 1) / block_k - seen.begin / block_k + 1) * std::min(step, blocks - n);
  }
  return tiles;
}

}  // namespace

int64_t PlanPart::visible_tiles(int64_t block_q, int64_t block_k) const {
  if (band.chunks) return visible_tiles_of_chunks(sizes, band, block_q, block_k);
  const int64_t blocks = sizes.seqlen_q / block_q;  // whole blocks
  const int64_t last_rows = sizes.seqlen_q % block_q;
  int64_t tiles = 0;
  if (last_rows > 0) {
    const Range seen = visible_keys(band, sizes.seqlen_q - last_rows, sizes.seqlen_q, sizes.seqlen_k);
    if (seen.begin < seen.end) tiles += (seen.end - 1) / block_k - seen.begin / block_k + 1;
  }
  // Block i sees the keys [begin + i * block_q, end + i * block_q), cut off at 0 and seqlen_k.
  const int64_t begin = band.diagonal - band.left;
  const int64_t end = block_q + band.diagonal + band.right;
  if (begin >= end) return tiles;
  auto first_block_at = [&](int64_t key, int64_t offset) {  // the first i with offset + i * block_q >= key
    return clamp_to(key <= offset ? 0 : (key - offset - 1) / block_q + 1, 0, blocks);
  };
  const int64_t first = first_block_at(1, end);                // the first block that sees a key
  const int64_t last = first_block_at(sizes.seqlen_k, begin);  // after the last block that sees a key
  if (first >= last) return tiles;
  const int64_t past_0 = clamp_to(first_block_at(0, begin), first, last);
  const int64_t at_end = clamp_to(first_block_at(sizes.seqlen_k, end), first, last);
  // The tiles up to the last visible key, less the tiles before the first visible key.
  tiles += sum_of_quotients(at_end - first, end + first * block_q + block_k - 1, block_q, block_k);
  tiles += (last - at_end) * ceil_div(sizes.seqlen_k, block_k);
  tiles -= sum_of_quotients(last - past_0, begin + past_0 * block_q, block_q, block_k);
  return tiles;
}

template <class Op>
Plan plan_forward(const typename Op::Tensors& given, const typename Op::Options& options) {
  Op::check(given, options);
  check_contents(given, options);
  const auto placeholders = placeholders_of(given);
  const AttentionResult result = Op::empty(placeholders.given, options);
  const auto packed = Op::pack(placeholders.laid_out, options, not_allocated(result));
  return forward_plan(packed.params, given.query.device(), result, placeholders.copied_bytes,
                      options.deterministic);
}

Plan plan_int8(const Int8Tensors& given, const Int8Options& options) {
  AttentionInt8::check(given, options);
  check_contents(given, options);
  const auto placeholders = placeholders_of(given);
  const AttentionResult result = AttentionInt8::empty(placeholders.given, options);
  const auto packed = AttentionInt8::pack(placeholders.laid_out, options, not_allocated(result));
  Plan plan = plan_of(packed.params, given.query.device());
  plan.deterministic = true;
  plan.bytes = {{"out", bytes_of(result.out)},
                {"lse", bytes_of(result.lse)},
                {"workspace", plan.choice.workspace_bytes},
                {"copies", placeholders.copied_bytes}};
  return plan;
}

template <class Op, class Backward>
Plan plan_backward(const typename Op::Tensors& given, const typename Op::Options& options,
                   const decltype(Backward::Options::grad_mask)& grad_mask) {
  Op::check(given, options);
  check_contents(given, options);
  const auto placeholders = placeholders_of(given);
  const auto backward = backward_options<typename Backward::Options>(options, grad_mask);
  const AttentionResult result = Op::empty(placeholders.given, options);
  const typename Backward::Result gradients =
      Backward::empty(backward_tensors<typename Backward::Tensors>(placeholders.given, result), backward);
  const auto packed = Backward::pack(
      backward_tensors<typename Backward::Tensors>(placeholders.laid_out, not_allocated(result)), backward,
      not_allocated(gradients));
  return backward_plan(packed, given, gradients, placeholders.copied_bytes);
}

template Plan plan_forward<Attention>(const AttentionTensors&, const AttentionOptions&);
template Plan plan_forward<AttentionVarlen>(const VarlenTensors&, const VarlenOptions&);
template Plan plan_forward<AttentionCache>(const CacheTensors&, const CacheOptions&);
template Plan plan_backward<Attention, AttentionBackward>(const AttentionTensors&, const AttentionOptions&,
                                                          const GradFlags&);
template Plan plan_backward<AttentionVarlen, AttentionVarlenBackward>(const VarlenTensors&,
                                                                      const VarlenOptions&, const GradFlags&);
template Plan plan_forward<AttentionFlex>(const FlexTensors&, const FlexOptions&);
template Plan plan_forward<AttentionVarlenFlex>(const VarlenFlexTensors&, const VarlenFlexOptions&);
template Plan plan_forward<AttentionCacheFlex>(const CacheFlexTensors&, const CacheFlexOptions&);
template Plan plan_backward<AttentionFlex, AttentionFlexBackward>(const FlexTensors&, const FlexOptions&,
                                                                  const FlexGradFlags&);
template Plan plan_backward<AttentionVarlenFlex, AttentionVarlenFlexBackward>(const VarlenFlexTensors&,
                                                                              const VarlenFlexOptions&,
                                                                              const FlexGradFlags&);

}  // namespace flash_attn_ext
