// Rows of a result that came out as NaN: which they are, whether something hidden may have caused it, and what
// of them is computed once more.
//
// A hidden element of P or dS is 0, but in a product 0 x NaN is NaN, and 0 x Inf too. The products have
// hidden elements only in tiles at the edge of the band, of a key mask and of a packed sequence. So a NaN is wrong only if a row of the other operand
// that is hidden there is not finite, and everything else is left as it is: an overflow of fp16, after which
// each row is NaN, costs next to nothing. What is computed once more takes a warp and, for each row, at most
// one step for each element that the row sees: the most where each row's only NaN lies in the last element
// that is read, and each edge hides another.
#pragma once

#include <cmath>

#include "../../core/mask.h"
#include "../convert.h"
#include "../lanes.cuh"
#include "band.h"
#include "rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

constexpr unsigned kAllLanes = 0xffffffffu;

// Bit n: row n of the warp holds a NaN.
template <int kElements>
__device__ uint32_t rows_with_nan(const float (&x)[kElements]) {
  uint32_t rows = 0;
#pragma unroll
  for (int n = 0; n < kElements; ++n) rows |= uint32_t{x[n] != x[n]} << (first_row_in_warp() + n / 2 % 2 * 8);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) rows |= __shfl_xor_sync(kAllLanes, rows, lanes);
  return rows;
}

struct EveryRow {
  __device__ bool operator()(int64_t) const { return true; }
};

// Whether one of these rows of a tensor, of `columns`, holds a NaN or Inf; by a warp, which reads 16 bytes a lane.
template <class In, int kHeadDim, class IsRead = EveryRow>
__device__ bool has_non_finite_rows(const Tensor4& t, int64_t b, int64_t h, Range rows, int64_t columns,
                                    const IsRead& is_read = {}) {
  constexpr int kPiece = 8, kPieces = kHeadDim / kPiece;
  constexpr uint32_t kExponent = std::is_same_v<In, __half> ? 0x7c00 : 0x7f80;
  const int64_t end = rows.end * kPieces;
  for (int64_t first = rows.begin * kPieces; first < end; first += 32) {
    const int64_t at = first + threadIdx.x % 32, column = at % kPieces * kPiece;
    bool found = false;
    if (at < end && column < columns && is_read(at / kPieces)) {
      const In* piece = t.row<In>(b, h, at / kPieces) + column;
      const uint4 pairs = *reinterpret_cast<const uint4*>(piece);
      for (const uint32_t pair : {pairs.x, pairs.y, pairs.z, pairs.w})
        found |= (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
    }
    if (__ballot_sync(kAllLanes, found) != 0) return true;
  }
  return false;
}

// Where the rows end that a tile may hold: those behind a packed sequence are the next one's.
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

// Whether a key row of the tiles [tiles.begin, tiles.end) that one of the query rows [begin, end) does not see is not
// finite in `t`. `tiles` may end behind the tensor.
template <class In, int kHeadDim>
__device__ bool has_non_finite_hidden_keys(const AttentionParams& p, const Tensor4& t, int64_t columns,
                                           int64_t b, int64_t h_kv, Range rows, Range tiles) {
  const Range first = visible_keys(p.band, rows.begin, rows.begin + 1, p.sizes.seqlen_k);
  const Range last = visible_keys(p.band, rows.end - 1, rows.end, p.sizes.seqlen_k);
  const int64_t end = smaller(tiles.end, end_of_key_rows(p));
  const Range before{tiles.begin, smaller(last.begin, end)}, behind{larger(first.end, tiles.begin), end};
  const auto masked = [&](int64_t j) { return is_masked(p, b, j); };
  return has_non_finite_rows<In, kHeadDim>(t, b, h_kv, before, columns) ||
         has_non_finite_rows<In, kHeadDim>(t, b, h_kv, behind, columns) ||
         (p.mask && has_non_finite_rows<In, kHeadDim>(t, b, h_kv, {tiles.begin, end}, columns, masked));
}

// Of a row, with zeros behind its columns up to kHeadDim, a lane holds every 32nd element.
template <class In, int kHeadDim>
struct LaneRow {
  static constexpr int kCount = kHeadDim / 32;
  float x[kCount] = {};

  LaneRow() = default;
  __device__ LaneRow(const Tensor4& t, int64_t b, int64_t h, int64_t row, int64_t columns) {
    const int lane = threadIdx.x % 32;
    const In* from = t.row<In>(b, h, row) + lane;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (lane + 32 * n < columns) x[n] = widen(from[32 * n]);
  }
  __device__ float dot(const LaneRow& other) const {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) sum += x[n] * other.x[n];
    return total_of_lanes<32>(sum);
  }
  __device__ void add(float factor, const LaneRow& other) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] += factor * other.x[n];
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] *= factor;
  }
};

// The columns of a stored row that are NaN, of which a lane has every 32nd: in [begin, end), of which begin is a multiple
// of 32.
template <class In, int kHeadDim>
struct NanColumns {
  static constexpr int kCount = kHeadDim / 32;
  bool is_nan[kCount] = {};

  NanColumns() = default;  // none
  __device__ NanColumns(const Tensor4& t, int64_t b, int64_t h, int64_t row, int64_t begin, int64_t end) {
    const int lane = threadIdx.x % 32;
    const In* stored = t.row<In>(b, h, row) + lane;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (begin <= 32 * n && lane + 32 * n < end) {
        const float x = widen(stored[32 * n]);
        is_nan[n] = x != x;
      }
  }

  // Whether there is one, in the columns of all lanes.
  __device__ bool any() const {
    bool found = false;
#pragma unroll
    for (int n = 0; n < kCount; ++n) found |= is_nan[n];
    return __ballot_sync(kAllLanes, found) != 0;
  }

  // Whether one of them is not NaN in `x`, which is what the warp has found so far.
  __device__ bool any_open(const float (&x)[kCount]) const {
    bool open = false;
#pragma unroll
    for (int n = 0; n < kCount; ++n) open |= is_nan[n] && x[n] == x[n];
    return __ballot_sync(kAllLanes, open) != 0;
  }

  __device__ void store(const Tensor4& t, int64_t b, int64_t h, int64_t row, float factor,
                        const float (&x)[kCount]) const {
    In* to = t.row<In>(b, h, row) + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (is_nan[n]) to[32 * n] = round_to<In>(x[n] * factor);
  }
};

}  // namespace flash_attn_ext::cuda::sm90
