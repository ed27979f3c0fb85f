// Both products of decode for two or three vectors of rows at once: AVX2. Rows are lanes.
//
//   S^T   6 keys and 2 vectors, or 4 keys and 3 vectors: an element of K times a column of Q^T, [D][L] of each vector
//   P V   6 columns and 2 vectors, or 4 columns and 3 vectors: an element of V times a key of P^T, [keys][L] of each vector
//
// 12 sums in registers hide the latency of the multiply-adds. A load of an element serves all vectors, and a load of a vector serves
// all keys or columns. So 12 multiply-adds need 7 or 8 loads. One vector of rows (decode_vector_of_rows-inl.h) has 8 sums, and
// stores results more often.
//
// K and V are elements of T: float32 in place, or copies of 16 bits. P V computes O^T, [D_v][L] of each vector. A tile adds it to O
// once.
//
// Time divided by the time of one vector at a time (Zen 3). float32: 16 to 32 rows 0.86 to 0.93, adjacent heads 0.84 to 0.93. float16:
// S^T alone of 13 to 28 rows 0.88 to 0.97, both products of 32 rows 0.93 to 0.98. bfloat16: 32 rows 0.97 to 0.98. For both products of
// 16 and 24 rows of 16 bits it is 1.1, because of the copies.
#pragma once

#include "decode_lanes-inl.h"

// Some vectors of rows. Vector v of Q^T or P^T is [depth][L] at data + v * distance.
template <class T>
struct RowVectors {
  const T* data;
  int64_t distance;
};

// Returns how many keys, or columns of V, are multiplied at once.
template <int kVectors>
constexpr int kElementsAtOnce = kVectors == 3 ? 4 : 6;

// Calls body(first, n) for groups of n = N, 4 or 1 of `count` keys or columns. Groups of 4 come first, so that only whole groups of N
// remain: a page of 16 keys is 4 + 6 + 6, and 8 keys are 4 + 4.
template <int N, class Body>
FA_INLINE void for_each_group(int64_t count, const Body& body) {
  int64_t first = 0;
  const auto call = [&](auto n) FA_INLINE_LAMBDA {
    body(first, n);
    first += n.value;
  };
  while (count - first >= 4 && (count - first) % N != 0) call(std::integral_constant<int, 4>{});
  while (count - first >= N) call(std::integral_constant<int, N>{});
  while (count - first >= 1) call(std::integral_constant<int, 1>{});
}

// sum[v][n] += element(n) * vector v. `rows`: the first vector; the others are at `distance`.
template <int kVectors, int N, class T, class Element>
FA_INLINE void add_elements(Vec<T> (&sum)[kVectors][N], const T* rows, int64_t distance,
                            const Element& element) {
  Vec<T> row[kVectors];
#pragma GCC unroll 3
  for (int v = 0; v < kVectors; ++v) row[v] = in_register(load<T>(rows + v * distance));
#pragma GCC unroll 6
  for (int n = 0; n < N; ++n) {
    const Vec<T> x = splat<T>(element(n));
#pragma GCC unroll 3
    for (int v = 0; v < kVectors; ++v) sum[v][n] = multiply_add(sum[v][n], x, row[v]);
  }
}

// out = scale * S^T of N keys from key j on. `out`: [keys][L] of each vector, at `distance`. In: the type of K in memory.
template <class In, int kVectors, int N, class T>
FA_INLINE void score_keys(const RowVectors<T>& q, const Rows<T>& k, int64_t j, T scale, T* out,
                          int64_t distance, Prefetcher& ahead) {
  constexpr int L = kLanes<T>;
  constexpr int64_t kColumns = 64 / sizeof(In);  // between two prefetches: a cache line of each key
  Vec<T> sum[kVectors][N] = {};
  const T* key[N];
#pragma GCC unroll 6
  for (int n = 0; n < N; ++n) key[n] = k.row(j + n);
  for (int64_t first = 0; first < k.cols; first += kColumns) {
    const int64_t end = std::min(first + kColumns, k.cols);
    ahead.lines(lines_of<T>(N * (end - first)));
#pragma GCC unroll 2
    for (int64_t c = first; c < end; ++c)
      add_elements(sum, q.data + c * L, q.distance, [&](int n) FA_INLINE_LAMBDA { return key[n][c]; });
  }
#pragma GCC unroll 3
  for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) store<T>(out + v * distance + (j + n) * L, sum[v][n] * scale);
}

// The same for all keys.
template <class In, int kVectors, class T>
FA_NOINLINE void score_all_keys(const RowVectors<T>& q, const Rows<T>& k, int64_t keys, T scale, T* out,
                                int64_t distance, Prefetcher& ahead) {
  for_each_group<kElementsAtOnce<kVectors>>(keys, [&](int64_t j, auto n) FA_INLINE_LAMBDA {
    score_keys<In, kVectors, n.value>(q, k, j, scale, out, distance, ahead);
  });
}

// S^T of lanes_scored_together(). `q`: blocks at distance L * block_depth. `k`: the first row is key `first_key` of the
// tile `to`.
template <class In, class T>
inline void score_several_vectors(const T* q, int64_t block_depth, int64_t rows, const Rows<T>& k,
                                  int64_t keys, T scale, const LaneTile<T>& to, int64_t first_key,
                                  Prefetcher& ahead) {
  constexpr int L = kLanes<T>;
  for_several_vectors<T>(lanes_scored_together<In, T>(rows), [&](int64_t first, auto vectors) {
    const RowVectors<T> own{q + first * block_depth, L * block_depth};
    score_all_keys<In, vectors.value>(own, k, keys, scale, to.at(first, L, first_key), L * to.keys, ahead);
  });
}

// O^T = P V, or O^T += P V, for N columns from column c on. `chunk`: the rows of V. `sums`: O^T, [D_v][L] of each vector, at
// `distance`. In: the type of V in memory.
template <class In, int kVectors, int N, class T>
FA_INLINE void add_columns(const RowVectors<T>& probs, const Rows<T>* chunk, int64_t c, int64_t keys,
                           bool is_first, T* sums, int64_t distance, Prefetcher& ahead) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[kVectors][N] = {};
  const T* p = probs.data;
  for (int64_t j0 = 0; j0 < keys; j0 += kChunkRows, ++chunk) {
    const T* v = chunk->data + c;
    const int64_t count = std::min(kChunkRows, keys - j0), stride = chunk->stride;
    ahead.lines(lines_of<T>(count * N));
#pragma GCC unroll 2
    for (int64_t j = 0; j < count; ++j, p += L, v += stride)
      add_elements(sum, p, probs.distance, [&](int n) FA_INLINE_LAMBDA { return v[n]; });
  }
#pragma GCC unroll 3
  for (int i = 0; i < kVectors; ++i)
#pragma GCC unroll 6
    for (int n = 0; n < N; ++n) {
      T* to = sums + i * distance + (c + n) * L;
      store<T>(to, is_first ? sum[i][n] : load<T>(to) + sum[i][n]);
    }
}

// The same for all columns.
template <class In, int kVectors, class T>
FA_NOINLINE void add_columns_of_values(const RowVectors<T>& probs, const Rows<T>* v, int64_t keys,
                                       bool is_first, T* sums, int64_t distance, Prefetcher& ahead) {
  for_each_group<kElementsAtOnce<kVectors>>(v->cols, [&](int64_t c, auto n) FA_INLINE_LAMBDA {
    add_columns<In, kVectors, n.value>(probs, v, c, keys, is_first, sums, distance, ahead);
  });
}

// O += O^T of a tile, `rows` x `cols`. `sums`: vectors at distance ldo * L. ldo is a multiple of L.
template <class T>
inline void add_transposed(const T* sums, int64_t rows, int64_t cols, T* out, int64_t ldo) {
  constexpr int L = kLanes<T>;
  for (int64_t first = 0; first < rows; first += L)
    for (int64_t c = 0; c < cols; c += L) {
      Vec<T> square[L];
#pragma GCC unroll 8
      for (int n = 0; n < L; ++n)
        square[n] = c + n < cols ? load<T>(sums + first * ldo + (c + n) * L) : Vec<T>{};
      transpose<T>(square);
      T* to = out + first * ldo + c;
#pragma GCC unroll 8
      for (int r = 0; r < L; ++r)
        if (first + r < rows) store<T>(to + r * ldo, load<T>(to + r * ldo) + square[r]);
    }
}
