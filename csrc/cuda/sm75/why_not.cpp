#include <initializer_list>

#include "../own_fields.h"
#include "../sm80/alignment.h"
#include "../sm80/backward_schedule.h"
#include "../sm80/decode_splits.h"
#include "sm75.h"

namespace flash_attn_ext::cuda::sm75 {
namespace {

// Names every field of a call. After a new field, this file does not compile until the field is named here. If the
// kernels of this tier do not read the field, a function why_not must return a reason.
[[maybe_unused]] void name_every_field(const AttentionParams& p, const Tangents& t) {
  [[maybe_unused]] const auto& [dtype, sizes, q, k, v, out, lse, scale, softcap, band, mask, alibi, sink,
                                dropout, decode, varlen, functions] = p;
  [[maybe_unused]] const auto& [diagonal, left, right] = p.band.without_chunks();
  [[maybe_unused]] const auto& [chunk, first_key] = p.band.chunks;
  static_assert(sizeof(Band) == sizeof(DiagonalBand) + sizeof(Chunks), "names every field of Band");
  [[maybe_unused]] const auto& [mask_data, mask_dtype, mask_b, mask_h, mask_q, mask_k, key_data, key_dtype,
                                key_b, key_k] = p.mask;
  [[maybe_unused]] const auto& [slopes, slopes_b, slopes_h] = p.alibi;
  [[maybe_unused]] const auto& [sink_data, sink_b, sink_h] = p.sink;
  [[maybe_unused]] const auto& [rng_state, place, threshold, keep_scale, place_stride] = p.dropout;
  [[maybe_unused]] const auto& [num_splits, has_unified_max, unified_max] = p.decode;
  [[maybe_unused]] const auto& [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, total_q, total_k,
                                lower_right, mask_by_row, first_q, first_k, caches] = p.varlen;
  [[maybe_unused]] const auto& [batch_idx, leftpad, cache_count, cache_dtype, k_scale, v_scale, k_groups,
                                v_groups, pages, cache, tree_mask, first_masked, float8_products,
                                key_has_value] = p.varlen.cache;
  [[maybe_unused]] const auto& [page_table, page_count, page_size, num_pages, sequence] =
      p.varlen.cache.pages;
  [[maybe_unused]] const auto& [t_q, t_k, t_v, t_mask, t_alibi, t_sink] = t;
  using B = BackwardParams;
  static_assert(
      are_all_fields<B, AttentionParams>(&B::dout, &B::dweights, &B::dlse, &B::dq, &B::dk, &B::dv, &B::dmask,
                                         &B::dalibi_slopes, &B::dsink, &B::deterministic),
      "names every field of BackwardParams");
}

// The reasons that forward and backward share.
const char* why_not_either(const AttentionParams& p) {
  constexpr int64_t kMaxHeadDim = 128;
  if (p.functions) return "sm75: no functions of the user";
  if (p.band.chunks) return "sm75: no attention_chunk";
  if (p.dtype != DType::kFloat16) return "sm75: only float16";
  if (p.dropout.place) return "sm75: no dropout of a part of a larger call";
  if (p.sizes.head_dim > kMaxHeadDim || p.sizes.head_dim_v > kMaxHeadDim)
    return "sm75: only head dimensions up to 128";
  return nullptr;
}

constexpr const char* kUnaligned = "sm75: a tensor's rows are not aligned to 16 bytes";

}  // namespace

const char* why_not_forward(const AttentionParams& p) {
  using sm80::is_aligned;
  const Sizes& z = p.sizes;
  if (const char* why_not = why_not_either(p)) return why_not;
  if (p.decode.has_unified_max) return "sm75: no unified_max";
  if (p.varlen.cache.dtype != CacheDType::kOfQuery) return "sm75: no caches of 8 or 4 bits";
  if (p.varlen.cache.tree_mask) return "sm75: no tree_mask";
  if (p.varlen.cache.key_has_value) return "sm75: no qv with separate caches";
  if (!is_aligned(p.q, z.head_dim) || !is_aligned(p.k, z.head_dim) || !is_aligned(p.v, z.head_dim_v) ||
      !is_aligned(p.out, z.head_dim_v))
    return kUnaligned;
  return nullptr;
}

const char* why_not_backward(const BackwardParams& p) {
  const Sizes& z = p.sizes;
  if (p.dweights) return "sm75: no gradients of the weights";
  if (const char* why_not = why_not_either(p)) return why_not;
  for (const Tensor4& t : {p.q, p.k, p.dq, p.dk})
    if (!sm80::is_aligned(t, z.head_dim)) return kUnaligned;
  for (const Tensor4& t : {p.v, p.dout, p.dv})
    if (!sm80::is_aligned(t, z.head_dim_v)) return kUnaligned;
  return nullptr;
}

size_t forward_workspace(const AttentionParams& p) {
  return sm80::decode_workspace(p, sm80::Turing::kWidestPair);
}

size_t backward_workspace(const BackwardParams& p) {
  Arena arena(nullptr);
  sm80::BackwardWorkspace::lay_out<sm80::Turing>(arena, p);
  return arena.used();
}

}  // namespace flash_attn_ext::cuda::sm75
