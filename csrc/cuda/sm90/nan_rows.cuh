// Rows of a result that came out as NaN: which they are, whether something hidden may have caused it, and what
// of them is computed once more.
//
// A hidden element of P or dS is 0, but in a product 0 x NaN is NaN, and 0 x Inf too. The products have
// hidden elements only in tiles at the edge of the band. So a NaN is wrong only if a row of the other operand
// that is hidden there is not finite, and everything else is left as it is: an overflow of fp16, after which
// each row is NaN, costs next to nothing. What is computed once more takes a warp and, for each row, at most
// one step for each element that the row sees: the most where each row's only NaN lies in the last element
// that is read, and each edge hides another.
#pragma once

#include <cmath>

#include "../../core/mask.h"
#include "../convert.h"
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

// Whether one of these rows of a tensor holds a NaN or Inf; by a warp, which reads 16 bytes a lane.
template <class In, int kHeadDim>
__device__ bool has_non_finite_rows(const Tensor4& t, int64_t b, int64_t h, Range rows) {
  constexpr int kPiece = 8, kPieces = kHeadDim / kPiece;
  constexpr uint32_t kExponent = std::is_same_v<In, __half> ? 0x7c00 : 0x7f80;
  const int64_t end = rows.end * kPieces;
  for (int64_t first = rows.begin * kPieces; first < end; first += 32) {
    const int64_t at = first + threadIdx.x % 32;
    bool found = false;
    if (at < end) {
      const In* piece = t.row<In>(b, h, at / kPieces) + at % kPieces * kPiece;
      const uint4 pairs = *reinterpret_cast<const uint4*>(piece);
      for (const uint32_t pair : {pairs.x, pairs.y, pairs.z, pairs.w})
        found |= (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
    }
    if (__ballot_sync(kAllLanes, found) != 0) return true;
  }
  return false;
}

// The columns of a stored row that are NaN, of which a lane has every 32nd: in [begin, end), multiples of 32.
template <class In, int kHeadDim>
struct NanColumns {
  static constexpr int kCount = kHeadDim / 32;
  bool is_nan[kCount] = {};

  NanColumns() = default;  // none
  __device__ NanColumns(const Tensor4& t, int64_t b, int64_t h, int64_t row, int begin = 0,
                        int end = kHeadDim) {
    const In* stored = t.row<In>(b, h, row) + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (begin <= 32 * n && 32 * n < end) {
        const float x = widen(stored[32 * n]);
        is_nan[n] = x != x;
      }
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
