// One block's tile: the elements of each thread, the layout of shared memory, and the two products of this tier's
// kernels.
//
//   add_row_products     acc += L R^T    S = Q K^T, dP = dO V^T
//   add_weighted_rows    acc += W V      O = P V, dQ = dS K;  with W^T: dV = P^T dO, dK = dS^T Q
//
// The head dimension is not a compile-time constant. The first product loops over D in chunks. In the second product, a
// block computes a slice of columns.
#pragma once

#include <cmath>

#include "../../core/params.h"
#include "../convert.h"
#include "../lanes.cuh"
#include "../scores.cuh"
#include "../shared_memory.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::simt {

constexpr int kCols = kBlockK / kSide;  // score columns of a thread
constexpr int kDepth = 16;              // columns of L and R in shared memory at a time
constexpr int kStep = 16;               // rows of V in shared memory at a time

// Thread (x, y) of the square has the elements (y + 16 r, x + 16 c) of a tile. The 16 threads of a row are half of a
// warp.
__device__ inline int thread_x() { return threadIdx.x % kSide; }
__device__ inline int thread_y() { return threadIdx.x / kSide; }
__device__ inline int tile_row(int r) { return thread_y() + kSide * r; }
__device__ inline int tile_col(int c) { return thread_x() + kSide * c; }

// A tile of scores, P or dS: queries by keys. Between two products each thread works on its elements in shared memory,
// in a loop. The loop is not unrolled, because the code of masks, softcap, ALiBi and dropout is long.
template <class T, int kTileRows>
using ScoreTile = T[kTileRows][kBlockK + 1];  // the odd length spreads a column over all banks

template <class T, int kTileRows>
struct SharedMemory {
  T left[kTileRows][kDepth + 1];
  union {  // the products run one after the other
    T right[kBlockK][kDepth + 1];
    T values[kStep][kMaxSlice];
  };
  ScoreTile<T, kTileRows> weights;
};
static_assert(sizeof(SharedMemory<double, kBlockQ>) <= kTuringSharedBytes);

// The weight of a hidden element is -0; no other weight is -0. So a NaN or Inf in its value row is skipped, because 0 *
// NaN would be NaN. An element that attends passes NaN on, even if its weight is 0.
template <class T>
constexpr T kMaskedWeight = T(-0.0);

template <class T>
__device__ T weight_of(T x, bool attends) {
  return attends ? x + T(0) : kMaskedWeight<T>;  // -0 + 0 is 0
}

template <class T>
__device__ bool is_masked_weight(T weight) {
  return weight == T(0) && std::signbit(weight);
}

// `count` rows of a (.., S, D) tensor, from one row on.
template <class In>
struct Rows {
  const In* first;
  int64_t stride;
  int64_t count;

  __device__ const In* operator()(int n) const { return n < count ? first + n * stride : nullptr; }
};

// tile[n][d] = column `first` + d of row n; zero outside.
template <class T, int kCount, class Source>
__device__ void load_columns(T (&tile)[kCount][kDepth + 1], const Source& rows, int64_t first,
                             int64_t columns) {
  for (int e = threadIdx.x; e < kCount * kDepth; e += kThreads) {
    const int n = e / kDepth, d = e % kDepth;
    const auto row = rows(n);
    tile[n][d] = row && first + d < columns ? widen(row[first + d]) : T(0);
  }
}

// acc[r][c] += <left row, right row>. Other threads may still read `right` when it returns: the caller's next barrier
// protects it.
template <class T, int kTileRows, class Left, class Right>
__device__ void add_row_products(SharedMemory<T, kTileRows>& shared, const Left& left, const Right& right,
                                 int64_t columns, T (&acc)[kTileRows / kSide][kCols]) {
  constexpr int R = kTileRows / kSide;
  for (int64_t d0 = 0; d0 < columns; d0 += kDepth) {
    __syncthreads();  // all threads have read left, right, values and weights
    load_columns(shared.left, left, d0, columns);
    load_columns(shared.right, right, d0, columns);
    __syncthreads();  // publishes left and right
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      T a[R], b[kCols];
#pragma unroll
      for (int r = 0; r < R; ++r) a[r] = shared.left[tile_row(r)][d];
#pragma unroll
      for (int c = 0; c < kCols; ++c) b[c] = shared.right[tile_col(c)][d];
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int c = 0; c < kCols; ++c) acc[r][c] += a[r] * b[c];
    }
  }
}

// acc[r][c] += sum over n of weights[row][n] * value row n, in the slice of columns from `first_col` on. Transposed:
// weights[n][row]. `partial`: the tile may have hidden elements. No barrier is needed between writing the weights and
// the call.
template <bool kTransposed, class T, int kTileRows, int kAccRows, int kSliceCols, class Values>
__device__ void add_weighted_rows(SharedMemory<T, kTileRows>& shared, const ScoreTile<T, kTileRows>& weights,
                                  const Values& values, int64_t first_col, int64_t columns, bool partial,
                                  T (&acc)[kAccRows][kSliceCols]) {
  constexpr int kSlice = kSide * kSliceCols;
  for (int n0 = 0; n0 < values.count; n0 += kStep) {
    __syncthreads();  // publishes the weights; all threads have read right and the last values
    for (int e = threadIdx.x; e < kStep * kSlice; e += kThreads) {
      const int n = e / kSlice, c = e % kSlice;
      const auto row = values(n0 + n);
      shared.values[n][c] = row && first_col + c < columns ? widen(row[first_col + c]) : T(0);
    }
    __syncthreads();  // publishes the values
    for (int n = 0; n < kStep; ++n) {
      T v[kSliceCols];
#pragma unroll
      for (int c = 0; c < kSliceCols; ++c) v[c] = shared.values[n][tile_col(c)];
#pragma unroll
      for (int r = 0; r < kAccRows; ++r) {
        const int row = kTransposed ? n0 + n : tile_row(r), col = kTransposed ? tile_row(r) : n0 + n;
        const T weight = weights[row][col];
        if (partial && is_masked_weight(weight)) continue;
#pragma unroll
        for (int c = 0; c < kSliceCols; ++c) acc[r][c] += weight * v[c];
      }
    }
  }
}

// Writes the thread's elements of a product to shared memory.
template <class T, int R>
__device__ void store_elements(const T (&elements)[R][kCols], ScoreTile<T, R * kSide>& tile) {
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int c = 0; c < kCols; ++c) tile[tile_row(r)][tile_col(c)] = elements[r][c];
}

// The maximum, or the sum, over the 16 threads of a row.
template <class T>
__device__ T row_maximum(T x) {
  return maximum_of_lanes<kSide>(x);
}
template <class T>
__device__ T row_total(T x) {
  return total_of_lanes<kSide>(x);
}

}  // namespace flash_attn_ext::cuda::simt
