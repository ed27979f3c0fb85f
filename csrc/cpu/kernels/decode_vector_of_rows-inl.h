// S^T of decode for a whole vector of rows, on AVX2. A load broadcasts kSpan neighbouring columns of a key, and kSpan
// multiply-adds use it. With one load for each multiply-add the loads would be the limit: AVX2 has two of each in a cycle.
//
// Block b of L / kSpan rows is one vector of sums. Lane r * kSpan + i of it has column i of the block's row r. The sum of
// all spans of the kSpan blocks is a vector of S^T. Example: kSpan 2, L = 8. The rows of block 0 are 0, 1, 4 and 5:
//
//   q0[c] q0[c+1] q1[c] q1[c+1] q4[c] ...  times  k[c] k[c+1] k[c] k[c+1] k[c] ...
//
// Keys of 16 bits are widened in registers, after the broadcast.
#pragma once

#include "decode_lanes-inl.h"

// Loads neighbouring columns of a key: kVectors vectors of kSpan columns, repeated in all spans.
template <class In>
struct KeyColumns {
  static constexpr int kSpan = 2, kVectors = 1;
  FA_INLINE static void load(const In* k, Vec<In>* columns) { columns[0] = broadcast_span<kSpan>(k); }
};

#if FA_VECTOR_BYTES == 32

FA_INLINE U32 broadcast_8_bytes(const void* p) {
  uint64_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return (U32)(VecBits<double>{} + bits);
}

// The even columns, then the odd columns.
template <>
struct KeyColumns<BFloat16> {
  static constexpr int kSpan = 2, kVectors = 2;
  FA_INLINE static void load(const BFloat16* k, F32* columns) {
    widen_pairs(broadcast_8_bytes(k), columns[0], columns[1]);
  }
};

template <>
struct KeyColumns<Float16> {
  static constexpr int kSpan = 4, kVectors = 1;
  FA_INLINE static void load(const Float16* k, F32* columns) {
    uint64_t bits;
    std::memcpy(&bits, k, sizeof(bits));
    typedef uint64_t HalfBits __attribute__((vector_size(FA_VECTOR_BYTES / 2)));
    columns[0] = to_float((Half16)(HalfBits{} + bits), Float16{});
  }
};

#endif

// Copies q[r][c] of `rows` <= L rows: kSpan blocks for each vector of columns. Rows of `q` are padded with zeros to whole
// vectors. Lanes of missing rows repeat the last row.
template <class In, class T>
inline void load_vector_of_queries(const T* q, int64_t ldq, int64_t rows, int64_t depth, T* to) {
  using Columns = KeyColumns<In>;
  constexpr int L = kLanes<T>, kSpan = Columns::kSpan, kVectors = Columns::kVectors;
  constexpr int kPart = 16 / sizeof(T), kRows = kPart / kSpan;  // rows of a block in 16 bytes
  const T* from[kSpan][L];
  for (int b = 0; b < kSpan; ++b)
    for (int lane = 0; lane < L; ++lane) {
      const int64_t row = lane / kPart * kPart + b * kRows + lane % kPart / kSpan;
      from[b][lane] = q + std::min(row, rows - 1) * ldq + lane % kSpan * kVectors;
    }
  for (int64_t c = 0; c < depth; c += kSpan * kVectors)
    for (int v = 0; v < kVectors; ++v)
      for (int b = 0; b < kSpan; ++b, to += L)
#pragma GCC unroll 16
        for (int lane = 0; lane < L; ++lane) to[lane] = from[b][lane][c + v];
}

// Returns the sums of all spans of kSpan blocks: one lane for each row.
template <class T, int kSpan>
FA_INLINE Vec<T> sum_blocks(Vec<T> (&block)[kSpan]) {
  constexpr int kPart = 16 / sizeof(T);
  const VecIndex<T> even = every_second_part<T, 1, kPart>(0), odd = every_second_part<T, 1, kPart>(1);
#pragma GCC unroll 4
  for (int count = kSpan / 2; count > 0; count /= 2)
#pragma GCC unroll 4
    for (int b = 0; b < count; ++b)
      block[b] = pick<T>(block[2 * b], block[2 * b + 1], even) + pick<T>(block[2 * b], block[2 * b + 1], odd);
  return block[0];
}

// out[n] = scale * S^T of key j + n, for kDotSums / kSpan keys. Keys past `keys` read the last key again.
template <class In, class T>
FA_INLINE void vector_of_rows_block(const T* q, int64_t steps, const Rows<In>& k, int64_t j, int64_t keys,
                                    T scale, T* out, Prefetcher& ahead) {
  using Columns = KeyColumns<In>;
  constexpr int L = kLanes<T>, kSpan = Columns::kSpan, kVectors = Columns::kVectors, N = kDotSums / kSpan;
  constexpr int64_t kBytes = N * kSpan * kVectors * sizeof(In);  // of a step
  Vec<T> sum[N][kSpan];
  const In* key[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    key[n] = k.row(std::min<int64_t>(j + n, keys - 1));
#pragma GCC unroll 4
    for (int b = 0; b < kSpan; ++b) sum[n][b] = Vec<T>{};
  }
  int64_t until_line = 1;
  for (int64_t step = 0; step < steps; ++step, q += kVectors * kSpan * L) {
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      Vec<T> columns[kVectors];
      Columns::load(key[n] + step * kSpan * kVectors, columns);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 4
        for (int b = 0; b < kSpan; ++b)
          sum[n][b] = multiply_add(sum[n][b], columns[v], load<T>(q + (v * kSpan + b) * L));
    }
    if (--until_line == 0) {
      ahead.lines(ceil_div(kBytes, 64));
      until_line = std::max<int64_t>(64 / kBytes, 1);
    }
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) store<T>(out + n * L, sum_blocks<T, kSpan>(sum[n]) * scale);
}

// S^T of a chunk of at most kChunkRows keys. Writes whole blocks of keys. `copy` has room for kChunkRows keys.
template <class In, class T>
inline void score_vector_of_rows(const T* q, Rows<In> k, int64_t keys, T scale, T* out, In* copy,
                                 Prefetcher& ahead) {
  using Columns = KeyColumns<In>;
  constexpr int64_t kStep = Columns::kSpan * Columns::kVectors, kKeys = kDotSums / Columns::kSpan;
  const int64_t cols = ceil_div(k.cols, kStep) * kStep;
  if (k.cols != cols) {
    for (int64_t n = 0; n < keys; ++n) {
      std::memcpy(static_cast<void*>(copy + n * cols), k.row(n), k.cols * sizeof(In));
      std::memset(static_cast<void*>(copy + n * cols + k.cols), 0, (cols - k.cols) * sizeof(In));
    }
    k = {copy, cols, cols};
  }
  for (int64_t j = 0; j < keys; j += kKeys)
    vector_of_rows_block<In, T>(q, cols / kStep, k, j, keys, scale, out + j * kLanes<T>, ahead);
}
