// Tiles of fp16 or bf16 in shared memory, and the two products on tensor cores.
#pragma once

#include "../../core/params.h"
#include "../accumulators.cuh"
#include "../convert.h"
#include "../ptx.h"
#include "../scores.cuh"

namespace flash_attn_ext::cuda::sm80 {

constexpr int kChunk = 8;  // elements in 16 bytes, which cp.async and a lane of ldmatrix copy

// An element of the score matrix.
struct ElementIndex {
  int64_t b, h, i, j;
};

__device__ inline uint32_t lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }

// A tile of kRows x kCols elements. The chunks of a row are swizzled: the same chunk of eight rows is in eight
// different groups of banks. 128 bytes hold eight chunks, of one row or of two short rows.
template <class In, int kRows, int kCols>
struct Tile {
  In elements[kRows * kCols];

  static __device__ uint32_t swizzled(uint32_t row, uint32_t n) {
    constexpr int kBankRows = kCols >= 64 ? 1 : 64 / kCols;
    return n ^ (row / kBankRows % (8 / kBankRows));
  }
  __device__ In* chunk(uint32_t row, uint32_t n) {
    return elements + row * kCols + swizzled(row, n) * kChunk;
  }
  __device__ const In& at(int row, int col) const {
    return elements[row * kCols + swizzled(row, col / kChunk) * kChunk + col % kChunk];
  }

  // Starts the copy of rows [first, first + kRows) of a (.., S, D) tensor, from first_column on. Elements beyond its
  // ends are zeros.
  template <int kThreads>
  __device__ void load_async(const Tensor4& t, int64_t b, int64_t h, int64_t first, int64_t seqlen,
                             int64_t columns, int first_column = 0) {
    constexpr int kChunks = kCols / kChunk, kRowsAtOnce = kThreads / kChunks;
    // Rows n and n + 8 have the same swizzle, so a thread with a step of eight rows has a constant column.
    constexpr bool kKeepsColumn = kThreads % kChunks == 0 && kRowsAtOnce % 8 == 0 && kRows % kRowsAtOnce == 0;
    const auto copy = [&](In* target, int row, int n) {
      const int column = first_column + n * kChunk;
      const bool inside = first + row < seqlen && column < columns;
      const In* source = t.row<In>(b, h, inside ? first + row : 0) + (inside ? column : 0);
      ptx::cp_async_16(target, source, inside);
    };
    if constexpr (kKeepsColumn) {
      const int first_row = threadIdx.x / kChunks, n = threadIdx.x % kChunks;
      In* const target = chunk(first_row, n);
#pragma unroll
      for (int at = 0; at < kRows; at += kRowsAtOnce) copy(target + at * kCols, first_row + at, n);
    } else {
      for (int e = threadIdx.x; e < kRows * kChunks; e += kThreads)
        copy(chunk(e / kChunks, e % kChunks), e / kChunks, e % kChunks);
    }
  }
};

// A thread's part of a tile that is copied from global to shared memory, on GPUs without cp.async. It is in registers
// during the products of other tiles.
template <class ItsTile, int kThreads>
struct StagedTile;
template <class In, int kRows, int kCols, int kThreads>
struct StagedTile<Tile<In, kRows, kCols>, kThreads> {
  static constexpr int kRowChunks = kCols / kChunk, kCount = kRows * kRowChunks / kThreads;
  static_assert(kRows * kRowChunks % kThreads == 0);
  uint4 chunks[kCount];

  // The rows and columns of Tile::load_async().
  __device__ void fetch(const Tensor4& t, int64_t b, int64_t h, int64_t first, int64_t seqlen,
                        int64_t columns) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int64_t row = first + place(n) / kRowChunks, column = place(n) % kRowChunks * kChunk;
      const bool inside = row < seqlen && column < columns;
      chunks[n] =
          inside ? *reinterpret_cast<const uint4*>(t.row<In>(b, h, row) + column) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ void store(Tile<In, kRows, kCols>& tile) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      *reinterpret_cast<uint4*>(tile.chunk(place(n) / kRowChunks, place(n) % kRowChunks)) = chunks[n];
  }

 private:
  static __device__ int place(int n) { return threadIdx.x + n * kThreads; }
};

// Rows [row, row + 16) and columns [16 k, 16 k + 16) of a tile as a left operand.
template <class In, int kRows, int kCols>
__device__ void load_operand(Tile<In, kRows, kCols>& tile, int row, int k, uint32_t (&operand)[4]) {
  ptx::ldmatrix_x4(operand, tile.chunk(row + lane() % 16, 2 * k + lane() / 16));
}

// acc += A[:, 16k:16k+16] B[:, 16k:16k+16]^T. `a`: the operand of A's 16 rows. B's rows are rows of `b` from `row` on.
template <class In, int kRowsB, int kCols, int N>
__device__ void multiply_row_operand(const uint32_t (&operand)[4], Tile<In, kRowsB, kCols>& b, int row, int k,
                                     float (&acc)[N][4]) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t fragment_b[4];
    ptx::ldmatrix_x4(fragment_b,
                     b.chunk(row + 16 * n + lane() / 16 * 8 + lane() % 8, 2 * k + lane() / 8 % 2));
    ptx::mma_m16n8k16<In>(acc[2 * n], operand, fragment_b[0], fragment_b[1]);
    ptx::mma_m16n8k16<In>(acc[2 * n + 1], operand, fragment_b[2], fragment_b[3]);
  }
}

// acc += A B^T over the columns of `a`: S = Q K^T. A: 16 rows of `a` from row_a on. B: rows of `b` from row_b on, one
// for each column of acc. A smaller kUnrolled needs fewer registers.
template <int kUnrolled = 16, class In, int kRowsA, int kColsA, int kRowsB, int kColsB, int N>
__device__ void multiply_rows(Tile<In, kRowsA, kColsA>& a, int row_a, Tile<In, kRowsB, kColsB>& b, int row_b,
                              float (&acc)[N][4]) {
#pragma unroll kUnrolled
  for (int k = 0; k < kColsA / 16; ++k) {
    uint32_t operand[4];
    load_operand(a, row_a, k, operand);
    multiply_row_operand(operand, b, row_b, k, acc);
  }
}

// The same for the warp's 16 rows of `a` and all rows of `b`.
template <class In, int kRowsA, int kRowsB, int kCols>
__device__ void multiply_rows(Tile<In, kRowsA, kCols>& a, Tile<In, kRowsB, kCols>& b,
                              float (&acc)[kRowsB / 8][4]) {
  multiply_rows(a, 16 * warp(), b, 0, acc);
}

// A pair of neighbouring 16 x 8 accumulators as one 16 x 16 operand.
template <class In>
__device__ void pack_operand(const float (&left)[4], const float (&right)[4], uint32_t (&operand)[4]) {
  operand[0] = ptx::pack<In>(left[0], left[1]);
  operand[1] = ptx::pack<In>(left[2], left[3]);
  operand[2] = ptx::pack<In>(right[0], right[1]);
  operand[3] = ptx::pack<In>(right[2], right[3]);
}

// acc += W[:, 16k:16k+16] B[16k:16k+16]. The operand holds the warp's 16 rows of W. B has the columns of acc, from
// `col` on.
template <class In, int kRowsB, int kCols, int N>
__device__ void multiply_operand(const uint32_t (&operand)[4], Tile<In, kRowsB, kCols>& b, int k,
                                 float (&acc)[N][4], int col = 0) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t fragment_b[4];
    ptx::ldmatrix_x4_trans(
        fragment_b, b.chunk(16 * k + lane() / 8 % 2 * 8 + lane() % 8, col / kChunk + 2 * n + lane() / 16));
    ptx::mma_m16n8k16<In>(acc[2 * n], operand, fragment_b[0], fragment_b[1]);
    ptx::mma_m16n8k16<In>(acc[2 * n + 1], operand, fragment_b[2], fragment_b[3]);
  }
}

// acc += P B, with the warp's 16 rows of P in registers, as the result of multiply_rows: O = P V.
template <class In, int kRowsB, int kCols>
__device__ void multiply_probs(const float (&probs)[kRowsB / 8][4], Tile<In, kRowsB, kCols>& b,
                               float (&acc)[kCols / 8][4]) {
#pragma unroll
  for (int k = 0; k < kRowsB / 16; ++k) {
    uint32_t operand[4];
    pack_operand<In>(probs[2 * k], probs[2 * k + 1], operand);
    multiply_operand(operand, b, k, acc);
  }
}

// The same for P in packed operands: dV = P^T dO, dK = dS^T Q.
template <class In, int kRowsB, int kCols>
__device__ void multiply_packed(const uint32_t (&operands)[kRowsB / 16][4], Tile<In, kRowsB, kCols>& b,
                                float (&acc)[kCols / 8][4]) {
#pragma unroll
  for (int k = 0; k < kRowsB / 16; ++k) multiply_operand(operands[k], b, k, acc);
}

// The same for 16 rows of W in shared memory, from `row` on, and columns of B from `col` on.
template <class In, int kRowsW, int kRowsB, int kCols, int N>
__device__ void multiply_stored(Tile<In, kRowsW, kRowsB>& w, int row, Tile<In, kRowsB, kCols>& b, int col,
                                float (&acc)[N][4]) {
#pragma unroll 1  // unrolled, its addresses need too many registers
  for (int k = 0; k < kRowsB / 16; ++k) {
    uint32_t operand[4];
    load_operand(w, row, k, operand);
    multiply_operand(operand, b, k, acc, col);
  }
}

// acc += A^T B, 16 rows from `row` on, and the columns of acc from `col` on: dQ = dS K.
template <class In, int kRows, int kColsA, int kColsB, int N>
__device__ void multiply_transposed(Tile<In, kRows, kColsA>& a, Tile<In, kRows, kColsB>& b, int row, int col,
                                    float (&acc)[N][4]) {
#pragma unroll
  for (int k = 0; k < kRows / 16; ++k) {
    uint32_t fragment_a[4];
    ptx::ldmatrix_x4_trans(fragment_a,
                           a.chunk(16 * k + lane() / 16 * 8 + lane() % 8, row / kChunk + lane() / 8 % 2));
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      uint32_t fragment_b[4];
      ptx::ldmatrix_x4_trans(
          fragment_b, b.chunk(16 * k + lane() / 8 % 2 * 8 + lane() % 8, col / kChunk + 2 * n + lane() / 16));
      ptx::mma_m16n8k16<In>(acc[2 * n], fragment_a, fragment_b[0], fragment_b[1]);
      ptx::mma_m16n8k16<In>(acc[2 * n + 1], fragment_a, fragment_b[2], fragment_b[3]);
    }
  }
}

}  // namespace flash_attn_ext::cuda::sm80
