#include <initializer_list>

#include "../../core/program.h"
#include "../../core/splits.h"
#include "../own_fields.h"
#include "../simt/flex.h"
#include "alignment.h"
#include "backward_schedule.h"
#include "flex_schedule.h"
#include "sm80.h"

namespace flash_attn_ext::cuda::sm80 {
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

constexpr int64_t kMaxHeadDim = 256, kMaxJvpHeadDim = 128;
// The kernels count rows in 32 bits, up to the end of the last tile.
constexpr int64_t kMaxLength = (int64_t{1} << 31) - 1024;

constexpr const char* kWide = "sm80: only head dimensions up to 256";
constexpr const char* kChunks = "sm80: no attention_chunk";
constexpr const char* kLong = "sm80: only sequences of up to 2^31 - 1024 rows";
constexpr const char* kUnaligned = "sm80: a tensor's rows are not aligned to 16 bytes";

// Why this tier does not run the functions of a call. Null: it does, or the call has no functions.
template <class Params>
const char* why_not_functions(const Params& p) {
  if (!p.functions) return nullptr;
  if (simt::why_not_functions(p)) return "sm80: no functions of the user beyond the limits of simt";
  if (p.functions->score && p.mask) return "sm80: no attn_mask together with a score_mod";
  return nullptr;
}

}  // namespace

bool is_decode(const AttentionParams& p) {
  constexpr int64_t kFewQueries = 16;
  return p.varlen.cache.pages || flash_attn_ext::is_decode(p, kFewQueries);
}

const char* why_not_forward(const AttentionParams& p) {
  if (const char* reason = why_not_functions(p)) return reason;
  if (p.band.chunks) return kChunks;
  const Sizes& z = p.sizes;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "sm80: only float16 and bfloat16";
  if (p.decode.has_unified_max) return "sm80: no unified_max";
  if (p.varlen.cache.dtype != CacheDType::kOfQuery) return "sm80: no caches of 8 or 4 bits";
  if (p.varlen.cache.tree_mask) return "sm80: no tree_mask";
  if (p.varlen.cache.key_has_value) return "sm80: no qv with separate caches";
  if (p.dropout.place) return "sm80: no dropout of a part of a larger call";
  if (z.head_dim > kMaxHeadDim || z.head_dim_v > kMaxHeadDim) return kWide;
  if (z.seqlen_q > kMaxLength || z.seqlen_k > kMaxLength) return kLong;
  if (!is_aligned(p.q, z.head_dim) || !is_aligned(p.k, z.head_dim) || !is_aligned(p.v, z.head_dim_v) ||
      !is_aligned(p.out, z.head_dim_v))
    return kUnaligned;
  return nullptr;
}

const char* why_not_backward(const BackwardParams& p) {
  if (const char* reason = why_not_functions(p)) return reason;
  // The kernel for 256 would spill 4 to 16 bytes for each thread.
  if (p.functions && p.functions->score && padded_head_dim(p.sizes) > 192)
    return "sm80: the backward of a score_mod only with head dimensions up to 192";
  if (p.functions && p.dropout) return "sm80: no dropout in the backward with functions of the user";
  if (p.band.chunks) return kChunks;
  const Sizes& z = p.sizes;
  if (p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) return "sm80: only float16 and bfloat16";
  if (p.dropout.place) return "sm80: no dropout of a part of a larger call";
  if (z.head_dim > kMaxHeadDim || z.head_dim_v > kMaxHeadDim) return kWide;
  if (z.seqlen_q > kMaxLength || z.seqlen_k > kMaxLength) return kLong;
  // A gradient that is not wanted is null, which is aligned.
  for (const Tensor4& t : {p.q, p.k, p.dq, p.dk})
    if (!is_aligned(t, z.head_dim)) return kUnaligned;
  for (const Tensor4& t : {p.v, p.dout, p.dv})
    if (!is_aligned(t, z.head_dim_v)) return kUnaligned;
  return nullptr;
}

const char* why_not_jvp(const JvpParams& p) {
  if (p.functions) return "sm80: no functions of the user";
  const Sizes& z = p.sizes;
  if (const char* why_not = why_not_forward(p)) return why_not;
  if (p.varlen) return "sm80: no forward mode of packed sequences";
  if (z.head_dim > kMaxJvpHeadDim || z.head_dim_v > kMaxJvpHeadDim)
    return "sm80: its forward mode takes only head dimensions up to 128";
  // A tangent that is absent is null, which is aligned.
  const Tangents& t = p.tangents;
  if (!is_aligned(t.q, z.head_dim) || !is_aligned(t.k, z.head_dim) || !is_aligned(t.v, z.head_dim_v) ||
      !is_aligned(p.t_out, z.head_dim_v))
    return kUnaligned;
  return nullptr;
}

size_t flex_forward_workspace(const AttentionParams& p) { return simt::flex_workspace(p); }

size_t flex_backward_workspace(const BackwardParams& p) {
  Arena arena(nullptr);
  FlexBackwardWorkspace::lay_out(arena, p);
  return arena.used();
}

size_t backward_workspace(const BackwardParams& p) {
  Arena arena(nullptr);
  BackwardWorkspace::lay_out(arena, p);
  return arena.used();
}

}  // namespace flash_attn_ext::cuda::sm80
