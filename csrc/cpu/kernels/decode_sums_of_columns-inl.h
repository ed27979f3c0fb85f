// S^T of decode on AVX-512 without dot products of bfloat16, for a block of at most L / 2 rows and keys of 16 bits.
//
// The lanes are columns. A vector of columns of a key is read and widened in registers, and multiplied by each row:
//
//   q0[c] q0[c+1] ... q0[c+L-1]  times  k[c] k[c+1] ... k[c+L-1]
//
// The blocks of decode_lanes-inl.h need a widened copy of the keys. To write and read the copy took as long as the
// multiply-adds. Here L sums, one for each (key, row), are reduced to one vector of S^T at the end.
#pragma once

#include "decode_lane_values-inl.h"

// The form of the product for blocks of R rows. A key has kLanesOut lanes in S^T.
template <class In, class T, int R>
struct ColumnForm {
  using Columns = WideValues<In, T>;
  static constexpr int kVectors = Columns::kVectors, kStep = kVectors * kLanes<T>;  // columns of a step
  static constexpr int kLanesOut = static_cast<int>(lanes_of<T>(R));
  static constexpr int kKeys = R > 6 ? 2 : 4;  // as many sums as fit the registers
};

// Calls body(R) for the least number of rows with a form: R >= rows.
template <class Body>
inline void for_column_form(int64_t rows, const Body& body) {
  if (rows <= 4) return body(std::integral_constant<int, 4>{});
  if (rows <= 6) return body(std::integral_constant<int, 6>{});
  if (rows == 7) return body(std::integral_constant<int, 7>{});
  body(std::integral_constant<int, 8>{});
}

// Returns a vector: lane i is the sum of the lanes of sum[i]. In contrast to sum_each(), each step is a shuffle without a
// vector of indices.
template <class T>
FA_INLINE Vec<T> sum_each_by_parts(Vec<T> (&sum)[kLanes<T>]) {
  constexpr int L = kLanes<T>, kPart = 16 / sizeof(T);
  const auto halve = [&](int count, VecIndex<T> even, VecIndex<T> odd) FA_INLINE_LAMBDA {
#pragma GCC unroll 16
    for (int n = 0; n < L / 2; ++n)
      if (n < count)
        sum[n] = pick<T>(sum[2 * n], sum[2 * n + 1], even) + pick<T>(sum[2 * n], sum[2 * n + 1], odd);
  };
  int count = L;
#pragma GCC unroll 4
  for (int lanes = kPart; lanes > 1; lanes /= 2)  // within 16 bytes
    halve(count /= 2, every_second_part<T, 1, kPart>(0), every_second_part<T, 1, kPart>(1));
#pragma GCC unroll 4
  while (count > 1) halve(count /= 2, every_second_part<T, kPart, L>(0), every_second_part<T, kPart, L>(1));
  return sum[0];
}

// Copies q[r][c] to [steps of columns][vectors of a step][R][L], in the order of the columns of a step, with zeros after the
// last row and column. Rows of `q` are padded with zeros to whole vectors.
template <class In, class T>
inline void load_columns_of_queries(const T* q, int64_t ldq, int64_t rows, int64_t depth, T* to) {
  constexpr int L = kLanes<T>, kVectors = WideValues<In, T>::kVectors;
  for_column_form(rows, [&](auto form_rows) {
    for (int64_t c = 0; c < depth; c += kVectors * L, to += form_rows.value * kVectors * L)
      for (int64_t r = 0; r < form_rows.value; ++r) {
        Vec<T> columns[kVectors];
        for (int v = 0; v < kVectors; ++v)
          columns[v] = r < rows && c + v * L < depth ? load<T>(q + r * ldq + c + v * L) : Vec<T>{};
        if constexpr (kVectors == 2) separate_lanes<T>(columns[0], columns[1]);
        for (int v = 0; v < kVectors; ++v) store<T>(to + (v * form_rows.value + r) * L, columns[v]);
      }
  });
}

// out = scale * S^T of kKeys keys from key j on. Keys past `keys` read the last key again. A key has whole steps of columns.
template <class In, class T, int R>
FA_INLINE void sums_of_columns(const T* q, const Rows<In>& k, int64_t j, int64_t keys, T scale, T* out,
                               Prefetcher& ahead) {
  using Form = ColumnForm<In, T, R>;
  constexpr int L = kLanes<T>, N = Form::kKeys, kVectors = Form::kVectors, kLanesOut = Form::kLanesOut;
  Vec<T> sum[N][R];
  const In* key[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    key[n] = k.row(std::min<int64_t>(j + n, keys - 1));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[n][r] = Vec<T>{};
  }
  for (int64_t c = 0; c < k.cols; c += Form::kStep, q += kVectors * R * L) {
    Vec<T> columns[N][kVectors];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) Form::Columns::load(key[n] + c, 0, false, Form::kStep, columns[n]);
    ahead.lines(lines_of<In>(N * Form::kStep));
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Vec<T> query = load<T>(q + (v * R + r) * L);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sum[n][r] = multiply_add(sum[n][r], query, columns[n][v]);
      }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; n += L / kLanesOut) {
    Vec<T> each[L];
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i)
      each[i] = i % kLanesOut < R ? sum[n + i / kLanesOut][i % kLanesOut] : Vec<T>{};
    store<T>(out + n * kLanesOut, sum_each_by_parts<T>(each) * scale);
  }
}

// S^T of a tile or a chunk of keys. Writes whole blocks of keys. `copy` has room for `keys` padded rows.
template <class In, class T>
inline void score_sums_of_columns(const T* q, int64_t rows, const Rows<In>& keys_in_place, int64_t keys,
                                  T scale, T* out, In* copy, Prefetcher& ahead) {
  const Rows<In> k = with_whole_steps(keys_in_place, keys, WideValues<In, T>::kVectors * kLanes<T>, copy);
  for_column_form(rows, [&](auto form_rows) {
    using Form = ColumnForm<In, T, form_rows.value>;
    for (int64_t j = 0; j < keys; j += Form::kKeys)
      sums_of_columns<In, T, form_rows.value>(q, k, j, keys, scale, out + j * Form::kLanesOut, ahead);
  });
}
