// Finds rows of a result that may be NaN because of hidden elements. These rows are then recomputed.
//
// A hidden element of P or dS is 0, but in a matrix product 0 x NaN and 0 x Inf are NaN. Products have hidden elements
// only in tiles at the edge of the band, of a key mask or of a packed sequence. So a NaN is wrong only if a hidden row
// of the other operand in these tiles is not finite. All other NaN are correct, for example after an overflow of fp16;
// then recomputing stops after a few steps. A warp recomputes a row, in at most one step for each element that the row
// sees.
#pragma once

#include <cmath>

#include "../../core/mask.h"
#include "../lane_rows.cuh"
#include "band.h"
#include "rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

// The NaN rows of a warp: bit n is row n.
template <int kElements>
__device__ uint32_t rows_with_nan(const float (&x)[kElements]) {
  uint32_t rows = 0;
#pragma unroll
  for (int n = 0; n < kElements; ++n) rows |= uint32_t{x[n] != x[n]} << (first_row_in_warp() + n / 2 % 2 * 8);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) rows |= __shfl_xor_sync(kAllLanes, rows, lanes);
  return rows;
}

// The end of the rows that a tile may contain. Rows after a packed sequence belong to the next sequence.
__device__ inline int64_t end_of_query_rows(const AttentionParams& p) {
  return p.varlen ? p.varlen.total_q - p.varlen.first_q : p.sizes.seqlen_q;
}
__device__ inline int64_t end_of_key_rows(const AttentionParams& p) {
  return p.varlen ? p.varlen.total_k - p.varlen.first_k : p.sizes.seqlen_k;
}

// Whether the mask, which all queries share, hides key j.
__device__ inline bool is_masked(const AttentionParams& p, int64_t b, int64_t j) {
  return p.mask && j < p.sizes.seqlen_k && !mask_shows_key(p.mask, b, j);
}

// The keys that nothing but the key mask hides inside the band.
struct HiddenByKeyMask {
  static constexpr bool kHidesAnywhere = false;  // whether it may hide any element of the band
  static constexpr bool kChangesScores = false;  // whether a function of the user computes the scores

  // Whether key j is hidden from a query i that sees it in the band; and whether it may be hidden from some query.
  __device__ bool hides(const AttentionParams& p, int64_t b, int64_t, int64_t, int64_t j) const {
    return is_masked(p, b, j);
  }
  __device__ bool may_hide(const AttentionParams& p) const { return bool(p.mask); }
  __device__ bool may_hide(const AttentionParams& p, int64_t b, int64_t j) const {
    return is_masked(p, b, j);
  }
};

// has_non_finite_hidden_keys() for keys that the band or the key mask hides.
template <class In, int kHeadDim>
__device__ bool has_non_finite_keys_outside(const AttentionParams& p, const Tensor4& t, int64_t columns,
                                            int64_t b, int64_t h_kv, Range rows, Range tiles,
                                            const HiddenByKeyMask& hidden) {
  const Range first = visible_keys(p.band.without_chunks(), rows.begin, rows.begin + 1, p.sizes.seqlen_k);
  const Range last = visible_keys(p.band.without_chunks(), rows.end - 1, rows.end, p.sizes.seqlen_k);
  const int64_t end = smaller(tiles.end, end_of_key_rows(p));
  const Range before{tiles.begin, smaller(last.begin, end)}, after{larger(first.end, tiles.begin), end};
  const auto masked = [&](int64_t j) { return hidden.may_hide(p, b, j); };
  return has_non_finite_rows<In, kHeadDim>(t, b, h_kv, before, columns) ||
         has_non_finite_rows<In, kHeadDim>(t, b, h_kv, after, columns) ||
         (hidden.may_hide(p) &&
          has_non_finite_rows<In, kHeadDim>(t, b, h_kv, {tiles.begin, end}, columns, masked));
}

// Whether a key row of the tiles [tiles.begin, tiles.end) that is hidden from one of the query rows [begin, end) is not
// finite in `t`. `tiles` may end after the tensor.
template <class In, int kHeadDim, class Hidden = HiddenByKeyMask>
__device__ bool has_non_finite_hidden_keys(const AttentionParams& p, const Tensor4& t, int64_t columns,
                                           int64_t b, int64_t h_kv, Range rows, Range tiles,
                                           const Hidden& hidden = {}) {
  if constexpr (Hidden::kHidesAnywhere)
    return has_non_finite_rows<In, kHeadDim>(t, b, h_kv,
                                             {tiles.begin, smaller(tiles.end, end_of_key_rows(p))}, columns);
  else
    return has_non_finite_keys_outside<In, kHeadDim>(p, t, columns, b, h_kv, rows, tiles, hidden);
}

}  // namespace flash_attn_ext::cuda::sm90
