#include "../../core/program.h"
#include "../own_fields.h"
#include "../simt/flex.h"
#include "backward_schedule.h"
#include "few_rows.h"
#include "flex_backward_workspace.h"
#include "sm90.h"
#include "tile_lists.h"

namespace flash_attn_ext::cuda::sm90 {
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

// Whether TMA can copy the tensor. The tensor starts at a multiple of 16 bytes. Its strides are multiples of 16 bytes,
// below 2^40 and not less than a row.
bool tma_takes(const Tensor4& t, int64_t columns, int64_t length, int64_t heads, int64_t batch,
               int64_t element_bytes = 2) {
  constexpr int64_t kBytes = 16, kMaxBytes = int64_t{1} << 40;
  const auto step = [=](int64_t stride, int64_t size) {
    const int64_t bytes = stride * element_bytes;
    return size == 1 || (stride >= columns && bytes % kBytes == 0 && bytes < kMaxBytes);
  };
  return reinterpret_cast<uintptr_t>(t.data) % kBytes == 0 && step(t.stride_s, length) &&
         step(t.stride_h, heads) && step(t.stride_b, batch);
}

// Packed sequences share one descriptor.
bool takes_queries(const Tensor4& t, const AttentionParams& p, int64_t columns) {
  const Sizes& z = p.sizes;
  return p.varlen ? tma_takes(t, columns, p.varlen.total_q, z.heads, 1)
                  : tma_takes(t, columns, z.seqlen_q, z.heads, z.batch);
}
bool takes_keys(const Tensor4& t, const AttentionParams& p, int64_t columns) {
  const Sizes& z = p.sizes;
  return p.varlen ? tma_takes(t, columns, p.varlen.total_k, z.heads_kv, 1)
                  : tma_takes(t, columns, z.seqlen_k, z.heads_kv, z.batch);
}

// Whether the tensor can be accessed by 16 bytes at a time.
bool is_aligned(const Tensor4& t) {
  constexpr int64_t kBytes = 16, kElements = 8;
  return reinterpret_cast<uintptr_t>(t.data) % kBytes == 0 && t.stride_b % kElements == 0 &&
         t.stride_h % kElements == 0 && t.stride_s % kElements == 0;
}

// Reasons against both forward and backward.
const char* why_not_either(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "sm90: only float16 and bfloat16";
  if (p.varlen.cache.dtype == CacheDType::kFloat8E4M3)
    return "sm90: products of float8 only if query is float8 too, and a sequence's keys share their factor";
  if (p.varlen && !p.varlen.cu_seqlens_k) return "sm90: no caches";
  for (const int64_t columns : {z.head_dim, z.head_dim_v})
    if (columns < 8 || columns > 256 || columns % 8 != 0)
      return "sm90: only head dimensions in eights, up to 256";
  if (p.band.chunks) return "sm90: no attention_chunk";
  if (p.alibi || p.dropout) return "sm90: no ALiBi or dropout";
  if (p.mask &&
      (!p.mask.only_masks() || p.mask.stride_h != 0 || p.mask.stride_q != 0 || p.varlen.mask_by_row))
    return "sm90: only bool masks that all heads and queries share, as padding is";
  const VarlenParams& packed = p.varlen;
  if (z.batch == 0 || z.heads == 0 || z.seqlen_q == 0 || z.seqlen_k == 0 ||
      (packed && (packed.total_q == 0 || packed.total_k == 0)))
    return "sm90: an empty input";
  if (z.seqlen_q > kMaxLength || z.seqlen_k > kMaxLength || packed.total_q > kMaxLength ||
      packed.total_k > kMaxLength)
    return "sm90: a sequence is too long";
  return nullptr;
}

// Why this tier does not run the functions of a call; null: it does, or the call has none.
template <class Params>
const char* why_not_functions(const Params& p) {
  return p.functions && simt::why_not_functions(p)
             ? "sm90: no functions of the user beyond the limits of simt"
             : nullptr;
}

constexpr const char* kNotForTma =
    "sm90: a tensor is not aligned to 16 bytes, or its rows are broadcast or overlap";

// Reasons against products of float8_e4m3fn.
const char* why_not_float8(const AttentionParams& p) {
  constexpr int64_t kFewQueries = 16;
  const Sizes& z = p.sizes;
  const CacheParams& cache = p.varlen.cache;
  const PageTable& pages = cache.pages;
  if (cache.dtype != CacheDType::kFloat8E4M3)
    return "sm90: products of float8 only with keys of float8_e4m3fn";
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16)
    return "sm90: products of float8 only with out of float16 and bfloat16";
  for (const int64_t columns : {z.head_dim, z.head_dim_v})
    if (columns < 16 || columns > 256 || columns % 16 != 0)
      return "sm90: products of float8 only at head dimensions in sixteens, up to 256";
  if (p.functions || p.band.chunks || p.alibi || p.dropout || p.mask || p.softcap > 0 ||
      p.decode.has_unified_max || cache.key_has_value || p.varlen.seqused_q)
    return "sm90: products of float8 only with causal, window, scale, sink and lengths";
  if (z.seqlen_q <= kFewQueries) return "sm90: products of float8 only with more than 16 queries";
  if (z.batch == 0 || z.heads == 0 || z.seqlen_k == 0 || cache.caches == 0 || p.varlen.total_q == 0)
    return "sm90: an empty input";
  if (z.seqlen_q > kMaxLength || z.seqlen_k > kMaxLength || p.varlen.total_q > kMaxLength)
    return "sm90: a sequence is too long";
  if (pages && (pages.page_size % 8 != 0 || cache.leftpad))
    return "sm90: products of float8 only with pages of a multiple of 8 rows, without left padding";
  if (pages && (cache.k_scale.stride_b != 0 || cache.v_scale.stride_b != 0))
    return "sm90: products of float8 only with pages of the same factor";
  const int64_t rows = pages ? pages.page_size : z.seqlen_k;
  if (!is_aligned(p.q) || !is_aligned(p.out) ||
      !tma_takes(p.k, z.head_dim, rows, z.heads_kv, cache.caches, 1) ||
      !tma_takes(p.v, z.head_dim_v, rows, z.heads_kv, cache.caches, 1))
    return kNotForTma;
  return nullptr;
}

}  // namespace

const char* why_not_forward(const AttentionParams& p) {
  if (p.varlen.cache.float8_products) return why_not_float8(p);
  if (const char* reason = why_not_functions(p)) return reason;
  // With at most this number of rows for a group of heads, a block of sm80's decoding also reads K and V once.
  constexpr int64_t kFewQueries = 16, kDecodeRows = 32;
  const Sizes& z = p.sizes;
  if (const char* reason = why_not_either(p)) return reason;
  if (p.decode.has_unified_max) return "sm90: no unified_max";
  const bool changes_scores = p.functions && p.functions->score;
  if (!(p.scale > 0) && !(p.softcap > 0) && !changes_scores) return "sm90: only a positive scale";
  if (!p.functions && z.seqlen_q <= kFewQueries && z.seqlen_q * (z.heads / z.heads_kv) <= kDecodeRows)
    return "sm90: few queries, with at most 32 rows of the heads that share a key head: sm80 decodes them";
  if (!takes_queries(p.q, p, z.head_dim) || !takes_keys(p.k, p, z.head_dim) ||
      !takes_keys(p.v, p, z.head_dim_v) || !takes_queries(p.out, p, z.head_dim_v))
    return kNotForTma;
  return nullptr;
}

size_t forward_workspace(const AttentionParams& p) {
  return p.varlen.cache.float8_products ? 0 : ForwardWorkspace::bytes(p);
}

size_t flex_forward_workspace(const AttentionParams& p) {
  Arena arena(nullptr);
  FlexWorkspace::lay_out(arena, p);
  return arena.used();
}

const char* why_not_backward(const BackwardParams& p) {
  if (const char* reason = why_not_functions(p)) return reason;
  const Sizes& z = p.sizes;
  if (const char* reason = why_not_either(p)) return reason;
  if (!takes_queries(p.q, p, z.head_dim) || !takes_keys(p.k, p, z.head_dim) ||
      !takes_keys(p.v, p, z.head_dim_v) || !takes_queries(p.dout, p, z.head_dim_v) || !is_aligned(p.out) ||
      !is_aligned(p.dq) || !is_aligned(p.dk) || !is_aligned(p.dv))
    return kNotForTma;
  return nullptr;
}

size_t backward_workspace(const BackwardParams& p) { return BackwardWorkspace::bytes(p); }

size_t flex_backward_workspace(const BackwardParams& p) {
  Arena arena(nullptr);
  FlexBackwardWorkspace::lay_out(arena, p);
  return arena.used();
}

}  // namespace flash_attn_ext::cuda::sm90
