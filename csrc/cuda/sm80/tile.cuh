// Tiles of fp16 or bf16 in shared memory, and the two products on tensor cores.
#pragma once

#include "../../core/params.h"
#include "../convert.h"
#include "../ptx.h"
#include "../scores.cuh"

namespace flash_attn_ext::cuda::sm80 {

constexpr int kChunk = 8;  // elements in 16 bytes, what cp.async and a lane of ldmatrix move

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }

// Rows of kCols elements. The chunks of a row are swizzled, so that the same chunk of eight rows lies in
// eight different groups of banks.
template <class In, int kRows, int kCols>
struct Tile {
  In elements[kRows * kCols];

  __device__ In* chunk(int row, int n) { return elements + row * kCols + (n ^ (row % 8)) * kChunk; }
  __device__ const In& at(int row, int col) const {
    return elements[row * kCols + ((col / kChunk) ^ (row % 8)) * kChunk + col % kChunk];
  }

  // Starts the copy of rows [first, first + kRows) of a (.., S, D) tensor; zeros beyond its ends.
  template <int kThreads>
  __device__ void load_async(const Tensor4& t, int64_t b, int64_t h, int64_t first, int64_t seqlen,
                             int64_t columns) {
    constexpr int kChunks = kCols / kChunk;
    for (int e = threadIdx.x; e < kRows * kChunks; e += kThreads) {
      const int row = e / kChunks, n = e % kChunks;
      const bool inside = first + row < seqlen && n * kChunk < columns;
      const In* source = t.row<In>(b, h, inside ? first + row : 0) + (inside ? n * kChunk : 0);
      ptx::cp_async_16(chunk(row, n), source, inside);
    }
  }
};

// acc += A B^T. A is rows [16 warp, 16 warp + 16) of `a`, B all rows of `b`: S = Q K^T.
template <class In, int kRowsA, int kRowsB, int kCols>
__device__ void multiply_rows(Tile<In, kRowsA, kCols>& a, Tile<In, kRowsB, kCols>& b,
                              float (&acc)[kRowsB / 8][4]) {
#pragma unroll
  for (int k = 0; k < kCols / 16; ++k) {
    uint32_t fragment_a[4];
    ptx::ldmatrix_x4(fragment_a, a.chunk(16 * warp() + lane() % 16, 2 * k + lane() / 16));
#pragma unroll
    for (int n = 0; n < kRowsB / 16; ++n) {
      uint32_t fragment_b[4];
      ptx::ldmatrix_x4(fragment_b, b.chunk(16 * n + lane() / 16 * 8 + lane() % 8, 2 * k + lane() / 8 % 2));
      ptx::mma_m16n8k16<In>(acc[2 * n], fragment_a, fragment_b[0], fragment_b[1]);
      ptx::mma_m16n8k16<In>(acc[2 * n + 1], fragment_a, fragment_b[2], fragment_b[3]);
    }
  }
}

// acc += W B, with the warp's 16 rows of W in registers, as multiply_rows left them: O = P V.
template <class In, int kRowsB, int kCols>
__device__ void multiply_weights(const float (&weights)[kRowsB / 8][4], Tile<In, kRowsB, kCols>& b,
                                 float (&acc)[kCols / 8][4]) {
#pragma unroll
  for (int k = 0; k < kRowsB / 16; ++k) {
    // A pair of neighbouring 16 x 8 accumulators is one 16 x 16 operand.
    const float (&left)[4] = weights[2 * k], (&right)[4] = weights[2 * k + 1];
    const uint32_t fragment_a[4] = {pack<In>(left[0], left[1]), pack<In>(left[2], left[3]),
                                    pack<In>(right[0], right[1]), pack<In>(right[2], right[3])};
#pragma unroll
    for (int n = 0; n < kCols / 16; ++n) {
      uint32_t fragment_b[4];
      ptx::ldmatrix_x4_trans(fragment_b,
                             b.chunk(16 * k + lane() / 8 % 2 * 8 + lane() % 8, 2 * n + lane() / 16));
      ptx::mma_m16n8k16<In>(acc[2 * n], fragment_a, fragment_b[0], fragment_b[1]);
      ptx::mma_m16n8k16<In>(acc[2 * n + 1], fragment_a, fragment_b[2], fragment_b[3]);
    }
  }
}

// The largest, or the sum, over the four lanes of a row.
__device__ inline float quad_maximum(float x) {
  x = larger(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return larger(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float quad_total(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}  // namespace flash_attn_ext::cuda::sm80
