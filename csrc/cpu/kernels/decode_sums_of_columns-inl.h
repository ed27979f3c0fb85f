// S^T of decode on AVX2, and on AVX-512 without dot products of bfloat16, for keys of 16 bits and a block of at most L / 2 rows, or L
// rows of float16 on AVX2.
//
// The lanes are columns: L columns of a key, or L / 2 columns of each of two keys. A vector of columns is read and widened
// in registers, and multiplied by each row:
//
//   q0[c] q0[c+1] ... q0[c+L-1]  times  k[c] k[c+1] ... k[c+L-1]
//
// The blocks of decode_lanes-inl.h need a widened copy of the keys. To write and read the copy took as long as the
// multiply-adds. The blocks of decode_vector_of_rows-inl.h widen a vector for each two multiply-adds. Here a widened vector
// serves all rows: on AVX2 with 2 to 4 rows, float16 takes 0.84 to 0.90 of the time and bfloat16 0.90 to 1.02 (Zen 3,
// memory). With 5 to 8 rows float16 takes 0.74 to 0.95 of the time with a copy of the keys as float32. L sums, one for each (key,
// row), are reduced to one vector of S^T at the end.
#pragma once

#include "decode_lane_values-inl.h"

// Whether a vector has kHalf columns of each of two keys: for float16. The reduction of the sums is a large part of the
// product, and takes half as long with two keys in a vector.
#if defined(FA_TWO_16_BYTES)
template <class In>
constexpr bool kHasTwoKeys = std::is_same_v<In, Float16>;
#else
template <class In>
constexpr bool kHasTwoKeys = false;
#endif
template <class T>
constexpr int kHalf = kLanes<T> / 2;

// The form of the product for blocks of R rows. A key has kLanesOut lanes in S^T.
template <class In, class T, int R>
struct ColumnForm {
  using Columns = WideValues<In, T>;
  static constexpr int kVectors = Columns::kVectors, kStep = kVectors * kLanes<T>;  // columns of a step
  static constexpr int kLanesOut = static_cast<int>(lanes_of<T>(R));
  // As many sums as fit the registers.
  static constexpr int kKeys = kHasVectorsOfRows ? (R > 6   ? 1
                                                    : R > 2 ? 2
                                                            : 4)
                               : kHasTwoKeys<In> ? (R > 4 ? 4 : 8)
                                                 : (R > 6 ? 2 : 4);
  // Whether a prefetch serves several blocks of keys, or a part of one block. AVX2, float16: 6 rows take 0.97 of the time, 8 rows 0.96,
  // but 4 rows 1.02 to 1.05 (Zen 3).
  static constexpr bool kHasLongPrefetches = kHasVectorsOfRows && R > 4;
};

// Calls body(R) for the least number of rows with a form: R >= rows. In: the type of the keys. Codes of 8 and 4 bits have the forms of
// BFloat16.
template <class In, class Body>
inline void for_column_form(int64_t rows, const Body& body) {
  if constexpr (kHasVectorsOfRows) {
    if (rows <= 2) return body(std::integral_constant<int, 2>{});
    if (rows == 3) return body(std::integral_constant<int, 3>{});
    if constexpr (kMostRowsOfColumns<In, float> > 4) {
      if (rows == 5) return body(std::integral_constant<int, 5>{});
      if (rows == 6) return body(std::integral_constant<int, 6>{});
      if (rows == 7) return body(std::integral_constant<int, 7>{});
      if (rows == 8) return body(std::integral_constant<int, 8>{});
    }
    body(std::integral_constant<int, 4>{});
  } else {
    if (rows <= 4) return body(std::integral_constant<int, 4>{});
    if (rows <= 6) return body(std::integral_constant<int, 6>{});
    if (rows == 7) return body(std::integral_constant<int, 7>{});
    body(std::integral_constant<int, 8>{});
  }
}

// Adds neighbouring parts of kPart lanes of a span of kSpan lanes, first of a, then of b. Example: kPart 1, kSpan 4 gives a0 + a1,
// a2 + a3, b0 + b1, b2 + b3. In contrast to sum_each(), each step is a shuffle without a vector of indices.
template <class T, int kPart, int kSpan, class V>
FA_INLINE V add_parts(V a, V b) {
  const auto some = [&](int first) FA_INLINE_LAMBDA {
    return (V)pick<T>((Vec<T>)a, (Vec<T>)b, every_second_part<T, kPart, kSpan>(first));
  };
  return some(0) + some(1);
}

// Returns a vector: lane i is the sum of the lanes of sum[i].
template <class T, class V>
FA_INLINE V sum_each_by_parts(V (&sum)[kLanes<T>]) {
  constexpr int L = kLanes<T>, kPart = 16 / sizeof(T);
  const auto halve = [&](int count, auto part, auto span) FA_INLINE_LAMBDA {
#pragma GCC unroll 16
    for (int n = 0; n < L / 2; ++n)
      if (n < count) sum[n] = add_parts<T, part.value, span.value>(sum[2 * n], sum[2 * n + 1]);
  };
  int count = L;
#pragma GCC unroll 4
  for (int lanes = kPart; lanes > 1; lanes /= 2)  // within 16 bytes
    halve(count /= 2, std::integral_constant<int, 1>{}, std::integral_constant<int, kPart>{});
#pragma GCC unroll 4
  while (count > 1) halve(count /= 2, std::integral_constant<int, kPart>{}, std::integral_constant<int, L>{});
  return sum[0];
}

// Copies q[r][c] to [steps of columns][vectors of a step][R][L], in the order of the columns of a step, with zeros after the
// last row and column. Two keys in a vector: [steps of kHalf columns][R][kHalf columns, twice]. Rows of `q` are padded with
// zeros to whole vectors.
template <class In, class T>
inline void load_columns_of_queries(const T* q, int64_t ldq, int64_t rows, int64_t depth, T* to) {
  constexpr int L = kLanes<T>, kVectors = WideValues<In, T>::kVectors;
  for_column_form<In>(rows, [&](auto form_rows) {
    if constexpr (kHasTwoKeys<In>) {
      for (int64_t c = 0; c < ceil_div(depth, L) * L; c += kHalf<T>)
        for (int64_t r = 0; r < form_rows.value; ++r)
          for (int copy = 0; copy < 2; ++copy)
            for (int64_t i = 0; i < kHalf<T>; ++i) *to++ = r < rows ? q[r * ldq + c + i] : T(0);
      return;
    }
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

// Writes the addresses of N keys from key j on. Keys past `keys` are the last key again.
template <int N, class In>
FA_INLINE void load_key_addresses(const Rows<In>& k, int64_t j, int64_t keys, const In* (&key)[N]) {
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) key[n] = k.row(std::min<int64_t>(j + n, keys - 1));
}

// Bytes of one prefetch. AVX2: with 256 bytes, float16 and 4 rows take 0.87 of the time that they take with 64 bytes.
constexpr int64_t kBytesOfPrefetch = kHasVectorsOfRows ? 256 : 128;

// out = scale * S^T of kKeys keys from key j on. Keys past `keys` read the last key again. A key has whole steps of columns.
template <class In, class T, int R>
FA_INLINE void sums_of_columns(const T* q, const Rows<In>& k, int64_t j, int64_t keys, T scale, T* out,
                               Prefetcher& ahead) {
  using Form = ColumnForm<In, T, R>;
  constexpr int L = kLanes<T>, N = Form::kKeys, kVectors = Form::kVectors, kLanesOut = Form::kLanesOut;
  Vec<T> sum[N][R];
  const In* key[N];
#pragma GCC unroll 16
  for (int n = 0; n < N * R; ++n) sum[n / R][n % R] = Vec<T>{};
  load_key_addresses(k, j, keys, key);
  // Columns between two prefetches.
  constexpr int64_t kAtOnce = std::max<int64_t>(kBytesOfPrefetch / (N * sizeof(In)), Form::kStep);
  for (int64_t c = 0; c < k.cols; c += Form::kStep, q += kVectors * R * L) {
    if (!Form::kHasLongPrefetches && c % kAtOnce == 0)
      ahead.lines(lines_of<In>(N * std::min<int64_t>(kAtOnce, k.cols - c)));
    Vec<T> columns[N][kVectors];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) Form::Columns::load(key[n] + c, 0, false, Form::kStep, columns[n]);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v)
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        Vec<T> query = load<T>(q + (v * R + r) * L);
        // One load for several keys. For one key it is a part of the multiply-add: fewer instructions.
        if constexpr (N > 1) query = in_register(query);
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

#if defined(FA_TWO_16_BYTES)

// As sums_of_columns(), for vectors of two keys: two vectors, or four for at most 4 rows.
template <class T, int R>
FA_INLINE void sums_of_two_keys(const T* q, const Rows<Float16>& k, int64_t j, int64_t keys, T scale, T* out,
                                Prefetcher& ahead) {
  constexpr int L = kLanes<T>, kPart = 16 / sizeof(T), N = ColumnForm<Float16, T, R>::kKeys / 2;
  constexpr int64_t kAtOnce = 2 * L;  // columns of a call of the prefetcher
  Vec<T> sum[N][R];
  const Float16* key[2 * N];
  load_key_addresses(k, j, keys, key);
#pragma GCC unroll 16
  for (int n = 0; n < N * R; ++n) sum[n / R][n % R] = Vec<T>{};
  for (int64_t c = 0; c < k.cols; c += kHalf<T>, q += R * L) {
    if (c % kAtOnce == 0) ahead.lines(lines_of<Float16>(2 * N * kAtOnce));
    Vec<T> columns[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      columns[n] = to_float((Half16)FA_TWO_16_BYTES(key[2 * n] + c, key[2 * n + 1] + c), Float16{});
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec<T> query = in_register(load<T>(q + r * L));
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sum[n][r] = multiply_add(sum[n][r], query, columns[n]);
    }
  }
  // The sums of 4 rows in each 16 bytes. The first half of the vector has one key, the second half the next one.
  const auto of_four_rows = [&](int n, int first) FA_INLINE_LAMBDA {
    const auto sum_of = [&](int r) FA_INLINE_LAMBDA { return r < R ? sum[n][r < R ? r : 0] : Vec<T>{}; };
    return add_parts<T, 1, kPart>(add_parts<T, 1, kPart>(sum_of(first), sum_of(first + 1)),
                                  add_parts<T, 1, kPart>(sum_of(first + 2), sum_of(first + 3)));
  };
  if constexpr (R <= 4) {
#pragma GCC unroll 2
    for (int n = 0; n < N; n += 2)
      store<T>(out + n / 2 * L, add_parts<T, kPart, L>(of_four_rows(n, 0), of_four_rows(n + 1, 0)) * scale);
    return;
  }
  VecIndex<T> by_key;  // the parts of 16 bytes 0, 2, 1, 3
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) by_key[i] = (i / kPart % 2 * 2 + i / kPart / 2) * kPart + i % kPart;
#pragma GCC unroll 2
  for (int n = 0; n < N; ++n) {
    const Vec<T> all = add_parts<T, kPart, L>(of_four_rows(n, 0), of_four_rows(n, 4));
    store<T>(out + n * L, pick<T>(all, all, by_key) * scale);
  }
}

#endif

// S^T of a tile or a chunk of keys. Writes whole blocks of keys. `copy` has room for `keys` padded rows.
template <class In, class T>
inline void score_sums_of_columns(const T* q, int64_t rows, const Rows<In>& keys_in_place, int64_t keys,
                                  T scale, T* out, In* copy, Prefetcher& ahead) {
  const Rows<In> k = with_whole_steps(keys_in_place, keys, WideValues<In, T>::kVectors * kLanes<T>, copy);
  for_column_form<In>(rows, [&](auto form_rows) {
    using Form = ColumnForm<In, T, form_rows.value>;
#if defined(FA_TWO_16_BYTES)
    if constexpr (kHasTwoKeys<In>) {
      for (int64_t j = 0; j < keys; j += Form::kKeys)
        sums_of_two_keys<T, form_rows.value>(q, k, j, keys, scale, out + j * Form::kLanesOut, ahead);
      return;
    }
#endif
    constexpr int64_t kBytesOfLongPrefetch = 512;
    const int64_t blocks = std::max<int64_t>(kBytesOfLongPrefetch / (k.cols * Form::kKeys * sizeof(In)), 1),
                  at_once = Form::kHasLongPrefetches ? blocks * Form::kKeys : keys;
    for (int64_t first = 0; first < keys; first += at_once) {
      const int64_t end = std::min(first + at_once, keys);
      if (Form::kHasLongPrefetches) ahead.lines(lines_of<In>((end - first) * k.cols));
      for (int64_t j = first; j < end; j += Form::kKeys)
        sums_of_columns<In, T, form_rows.value>(q, k, j, keys, scale, out + j * Form::kLanesOut, ahead);
    }
  });
}
