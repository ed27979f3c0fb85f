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

  // The chunk that is `rows` rows and n chunks after chunk `first` of row `row`. `rows` is a multiple of 8, and n has no
  // bit of `first`. So for constant `rows` and n, its address is the address of the first chunk with one change: an
  // exclusive or by a part of n. Products need few instructions for their addresses.
  __device__ In* chunk_after(uint32_t row, uint32_t first, uint32_t rows, uint32_t n) {
    constexpr uint32_t kSwizzled = kCols >= 64 ? 8 : kCols / kChunk;  // chunks that the swizzle exchanges
    static_assert(kCols % 64 == 0 || 64 % kCols == 0);
    const uint32_t place = row * kCols + swizzled(row, first) * kChunk;
    return elements + (place ^ n % kSwizzled * kChunk) + (n / kSwizzled * kSwizzled * kChunk + rows * kCols);
  }

  // Starts the copy of rows [first, first + kRows) of a (.., S, D) tensor, from first_column on. Elements beyond its
  // ends are zeros.
  template <int kThreads>
  __device__ void load_async(const Tensor4& t, int64_t b, int64_t h, int64_t first, int64_t seqlen,
                             int64_t columns, int first_column = 0) {
    constexpr int kChunks = kCols / kChunk, kRowsAtOnce = kThreads / kChunks;
    // Rows n and n + 8 have the same swizzle, so a thread with a step of eight rows has a constant column.
    constexpr bool kKeepsColumn = kThreads % kChunks == 0 && kRowsAtOnce % 8 == 0 && kRows % kRowsAtOnce == 0;
    const In* const head = t.row<In>(b, h, 0);
    if constexpr (kKeepsColumn) {
      const int first_row = threadIdx.x / kChunks, n = threadIdx.x % kChunks;
      const int column = first_column + n * kChunk;
      const int rows = column < columns ? static_cast<int>(smaller<int64_t>(seqlen - first, kRows)) : 0;
      const In* source = head + (first + first_row) * t.stride_s + column;
      In* const target = chunk(first_row, n);
#pragma unroll
      for (int at = 0; at < kRows; at += kRowsAtOnce) {
        const bool inside = first_row + at < rows;
        ptx::cp_async_16(target + at * kCols, inside ? source : head, inside);
        source += kRowsAtOnce * t.stride_s;
      }
    } else {
      for (int e = threadIdx.x; e < kRows * kChunks; e += kThreads) {
        const int row = e / kChunks, n = e % kChunks, column = first_column + n * kChunk;
        const bool inside = first + row < seqlen && column < columns;
        ptx::cp_async_16(chunk(row, n), inside ? head + (first + row) * t.stride_s + column : head, inside);
      }
    }
  }
};

// Hides the elements of the thread's row r outside of the columns `shown`, and the elements without shows(n, e). Columns count
// from the thread's first column. Calls mark(n, e, whether the element is shown).
template <int N, class Shows, class Mark>
__device__ void hide_outside_columns(int r, Range shown, float (&scores)[N][4], const Shows& shows,
                                     const Mark& mark) {
  constexpr int64_t kFar = 1 << 20;  // beyond every tile
  const int begin = static_cast<int>(clamp_to(shown.begin, -kFar, kFar));
  const int end = static_cast<int>(clamp_to(shown.end, -kFar, kFar));
  const uint32_t count = end > begin ? end - begin : 0;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int e = 2 * r; e < 2 * r + 2; ++e) {
      const bool is_shown = static_cast<uint32_t>(8 * n + e % 2 - begin) < count && shows(n, e);
      scores[n][e] = is_shown ? scores[n][e] : -kInf<float>;
      mark(n, e, is_shown);
    }
}

// Whether an element of the chunk is Inf or NaN: all bits of its exponent are set.
template <class In>
__device__ bool has_non_finite(const In* chunk) {
  constexpr uint32_t kExponent = std::is_same_v<In, __half> ? 0x7c00 : 0x7f80;
  const uint4 pairs = *reinterpret_cast<const uint4*>(chunk);
  bool found = false;
  for (const uint32_t pair : {pairs.x, pairs.y, pairs.z, pairs.w})
    found |= (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
  return found;
}

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

// The accumulators or operands of one row tile as an array of one row tile.
template <class T, int N>
__device__ auto only(T (&x)[N]) -> T (&)[1][N] {
  return reinterpret_cast<T(&)[1][N]>(x);
}

// Rows [row, row + 16) and columns [16 k, 16 k + 16) of a tile as a left operand.
template <class In, int kRows, int kCols>
__device__ void load_operand(Tile<In, kRows, kCols>& tile, int row, int k, uint32_t (&operand)[4]) {
  ptx::ldmatrix_x4(operand, tile.chunk_after(row + lane() % 16, lane() / 16, 0, 2 * k));
}

// acc += A[:, 16k:16k+16] B[:, 16k:16k+16]^T, for each of M row tiles of A. operands[m]: row tile m. B's rows are rows of
// `b` from `row` on.
template <class In, int kRowsB, int kCols, int M, int N>
__device__ void multiply_row_operands(const uint32_t (&operands)[M][4], Tile<In, kRowsB, kCols>& b, int row,
                                      int k, float (&acc)[M][N][4]) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t fragment_b[4];
    ptx::ldmatrix_x4(fragment_b,
                     b.chunk_after(row + lane() / 16 * 8 + lane() % 8, lane() / 8 % 2, 16 * n, 2 * k));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      ptx::mma_m16n8k16<In>(acc[m][2 * n], operands[m], fragment_b[0], fragment_b[1]);
      ptx::mma_m16n8k16<In>(acc[m][2 * n + 1], operands[m], fragment_b[2], fragment_b[3]);
    }
  }
}

// acc += A B^T over the columns of `a`: S = Q K^T. A: M tiles of 16 rows of `a` from row_a on. B: rows of `b` from row_b on,
// one for each column of acc. A smaller kUnrolled needs fewer registers.
template <int kUnrolled = 16, class In, int kRowsA, int kColsA, int kRowsB, int kColsB, int M, int N>
__device__ void multiply_rows(Tile<In, kRowsA, kColsA>& a, int row_a, Tile<In, kRowsB, kColsB>& b, int row_b,
                              float (&acc)[M][N][4]) {
#pragma unroll kUnrolled
  for (int k = 0; k < kColsA / 16; ++k) {
    uint32_t operands[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) load_operand(a, row_a + 16 * m, k, operands[m]);
    multiply_row_operands(operands, b, row_b, k, acc);
  }
}

// One row tile.
template <class In, int kRowsB, int kCols, int N>
__device__ void multiply_row_operand(const uint32_t (&operand)[4], Tile<In, kRowsB, kCols>& b, int row, int k,
                                     float (&acc)[N][4]) {
  multiply_row_operands(only(operand), b, row, k, only(acc));
}
template <int kUnrolled = 16, class In, int kRowsA, int kColsA, int kRowsB, int kColsB, int N>
__device__ void multiply_rows(Tile<In, kRowsA, kColsA>& a, int row_a, Tile<In, kRowsB, kColsB>& b, int row_b,
                              float (&acc)[N][4]) {
  multiply_rows<kUnrolled>(a, row_a, b, row_b, only(acc));
}

// The same for the warp's rows of `a` and all rows of `b`.
template <class In, int kRowsA, int kRowsB, int kCols, int M>
__device__ void multiply_rows(Tile<In, kRowsA, kCols>& a, Tile<In, kRowsB, kCols>& b,
                              float (&acc)[M][kRowsB / 8][4]) {
  multiply_rows(a, 16 * M * warp(), b, 0, acc);
}
template <class In, int kRowsA, int kRowsB, int kCols>
__device__ void multiply_rows(Tile<In, kRowsA, kCols>& a, Tile<In, kRowsB, kCols>& b,
                              float (&acc)[kRowsB / 8][4]) {
  multiply_rows(a, b, only(acc));
}

// A pair of neighbouring 16 x 8 accumulators as one 16 x 16 operand.
template <class In>
__device__ void pack_operand(const float (&left)[4], const float (&right)[4], uint32_t (&operand)[4]) {
  operand[0] = ptx::pack<In>(left[0], left[1]);
  operand[1] = ptx::pack<In>(left[2], left[3]);
  operand[2] = ptx::pack<In>(right[0], right[1]);
  operand[3] = ptx::pack<In>(right[2], right[3]);
}

// acc += W[:, 16k:16k+16] B[16k:16k+16], for each of M row tiles of W. operands[m]: row tile m. B has the columns of acc,
// from `col` on.
template <class In, int kRowsB, int kCols, int M, int N>
__device__ void multiply_operands(const uint32_t (&operands)[M][4], Tile<In, kRowsB, kCols>& b, int k,
                                  float (&acc)[M][N][4], int col = 0) {
#pragma unroll
  for (int n = 0; n < N / 2; ++n) {
    uint32_t fragment_b[4];
    ptx::ldmatrix_x4_trans(fragment_b, b.chunk_after(lane() / 8 % 2 * 8 + lane() % 8, lane() / 16, 16 * k,
                                                     col / kChunk + 2 * n));
#pragma unroll
    for (int m = 0; m < M; ++m) {
      ptx::mma_m16n8k16<In>(acc[m][2 * n], operands[m], fragment_b[0], fragment_b[1]);
      ptx::mma_m16n8k16<In>(acc[m][2 * n + 1], operands[m], fragment_b[2], fragment_b[3]);
    }
  }
}
template <class In, int kRowsB, int kCols, int N>
__device__ void multiply_operand(const uint32_t (&operand)[4], Tile<In, kRowsB, kCols>& b, int k,
                                 float (&acc)[N][4], int col = 0) {
  multiply_operands(only(operand), b, k, only(acc), col);
}

// acc += P B, with the warp's rows of P in registers, as the result of multiply_rows: O = P V.
template <class In, int kRowsB, int kCols, int M>
__device__ void multiply_probs(const float (&probs)[M][kRowsB / 8][4], Tile<In, kRowsB, kCols>& b,
                               float (&acc)[M][kCols / 8][4]) {
#pragma unroll
  for (int k = 0; k < kRowsB / 16; ++k) {
    uint32_t operands[M][4];
#pragma unroll
    for (int m = 0; m < M; ++m) pack_operand<In>(probs[m][2 * k], probs[m][2 * k + 1], operands[m]);
    multiply_operands(operands, b, k, acc);
  }
}
template <class In, int kRowsB, int kCols>
__device__ void multiply_probs(const float (&probs)[kRowsB / 8][4], Tile<In, kRowsB, kCols>& b,
                               float (&acc)[kCols / 8][4]) {
  multiply_probs(only(probs), b, only(acc));
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
                           a.chunk_after(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2, 16 * k, row / kChunk));
#pragma unroll
    for (int n = 0; n < N / 2; ++n) {
      uint32_t fragment_b[4];
      ptx::ldmatrix_x4_trans(fragment_b, b.chunk_after(lane() / 8 % 2 * 8 + lane() % 8, lane() / 16, 16 * k,
                                                       col / kChunk + 2 * n));
      ptx::mma_m16n8k16<In>(acc[2 * n], fragment_a, fragment_b[0], fragment_b[1]);
      ptx::mma_m16n8k16<In>(acc[2 * n + 1], fragment_a, fragment_b[2], fragment_b[3]);
    }
  }
}

}  // namespace flash_attn_ext::cuda::sm80
