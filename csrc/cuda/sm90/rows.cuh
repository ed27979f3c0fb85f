// Stores rows of an accumulator of wgmma, 16 rows a warp.
#pragma once

#include "../scores.cuh"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kWarpRows = 16;

// A thread holds the rows g and g + 8 of a warp's 16.
__device__ inline int first_row_in_warp() { return threadIdx.x % 32 / 4; }
__device__ inline int first_column_in_eight() { return threadIdx.x % 4 * 2; }

// Transposes a 4 x 4 matrix over four threads: x[n] = element (n, t) becomes x[n] = element (t, n).
__device__ inline void transpose_in_four(uint32_t (&x)[4]) {
#pragma unroll
  for (int side = 1; side <= 2; side *= 2) {
    const bool upper = threadIdx.x & side;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & side) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + side], side);
      if (upper) {
        x[n] = received;
      } else {
        x[n + side] = received;
      }
    }
  }
}

// Stores a warp's 16 rows of left operands to a tile in shared memory, from (first_row, first_column) on.
template <class Tile, int kSteps>
__device__ void store_to_tile(Tile& tile, int first_row, int first_column, const uint32_t (&x)[kSteps][4]) {
  const int lane = threadIdx.x % 32, row = first_row + lane % 16, column = first_column + lane / 16 * 8;
#pragma unroll
  for (int n = 0; n < kSteps; ++n)
    ptx::store_matrices(&tile.bytes[0][0] + Tile::offset(row, column + 16 * n), x[n]);
}

// Rounds and stores a warp's 16 rows. `address_of(n, column)`: the address of eight columns of row n; null: not stored.
template <class In, int kElements, class PlaceOf>
__device__ void store_each_row(const PlaceOf& address_of, const float (&x)[kElements]) {
  // The four threads of a row hold pairs in each eight of 32 columns. After the exchange each thread stores one eight.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row_in_warp() + 8 * r;
#pragma unroll
    for (int c = 0; c < 2 * kElements; c += 32) {
      uint32_t pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int at = (c / 8 + n) * 4 + 2 * r;
        pairs[n] = ptx::pack<In>(x[at], x[at + 1]);
      }
      transpose_in_four(pairs);
      if (In* place = address_of(row, c + 4 * first_column_in_eight()))
        *reinterpret_cast<uint4*>(place) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

// Stores the rows of one head below `length`, from `first_column` on, in the columns below `columns`.
template <class In, int kElements>
__device__ void store_rows(const Tensor4& t, int64_t b, int64_t h, int64_t warp_row, int64_t length,
                           int columns, const float (&x)[kElements], int first_column = 0) {
  const auto address_of = [&](int n, int column) {
    const bool inside = warp_row + n < length && first_column + column < columns;
    return inside ? t.row<In>(b, h, warp_row + n) + first_column + column : nullptr;
  };
  store_each_row<In>(address_of, x);
}

}  // namespace flash_attn_ext::cuda::sm90
