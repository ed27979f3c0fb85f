// Rows of 16-bit tensors in the lanes of a warp, to repair results and gradients that are wrongly NaN.
#pragma once

#include <type_traits>

#include "../core/mask.h"
#include "convert.h"
#include "lanes.cuh"

namespace flash_attn_ext::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;

struct EveryRow {
  __device__ bool operator()(int64_t) const { return true; }
};

// Whether a row of [rows.begin, rows.end) with is_read(row) contains a NaN or Inf. All lanes of a warp call it; each
// reads 16 bytes at a time. kHeadDim: `columns`, rounded up.
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

// A row in the registers of a warp: lane l holds columns l, l + 32, ... Columns past the row's end are 0.
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
  template <class Other>
  __device__ float dot(const LaneRow<Other, kHeadDim>& other) const {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) sum += x[n] * other.x[n];
    return total_of_lanes<32>(sum);
  }
  template <class Other>
  __device__ void add(float factor, const LaneRow<Other, kHeadDim>& other) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] += factor * other.x[n];
  }
  __device__ void scale(float factor) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] *= factor;
  }
};

// Marks the NaN columns of a stored row, in [begin, end). Lane l owns columns l, l + 32, ...; begin is a multiple of 32.
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

  // Whether any lane has a marked column.
  __device__ bool any() const {
    bool found = false;
#pragma unroll
    for (int n = 0; n < kCount; ++n) found |= is_nan[n];
    return __ballot_sync(kAllLanes, found) != 0;
  }

  // Whether `x`, the sums so far, has a marked column that is not NaN. If not, further additions change nothing.
  __device__ bool any_open(const float (&x)[kCount]) const {
    bool open = false;
#pragma unroll
    for (int n = 0; n < kCount; ++n) open |= is_nan[n] && x[n] == x[n];
    return __ballot_sync(kAllLanes, open) != 0;
  }

  // Writes x * factor to the marked columns.
  __device__ void store(const Tensor4& t, int64_t b, int64_t h, int64_t row, float factor,
                        const float (&x)[kCount]) const {
    In* to = t.row<In>(b, h, row) + threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (is_nan[n]) to[32 * n] = round_to<In>(x[n] * factor);
  }
};

}  // namespace flash_attn_ext::cuda
