// The two products of decode, S = Q K^T and O += P V, in two forms.
//
// One or two rows: the lanes hold columns, K and V are read from the caller's memory, and later rows are prefetched.
// More rows: `many` multiplies all rows at once, with rows as lanes.
#pragma once

#include "decode_many_rows-inl.h"
#include "scores-inl.h"

// Number of rows in scratch memory for the scores of `rows` rows, because rows may be lanes.
template <class T>
constexpr int64_t score_rows(int64_t rows) {
  return fills_lanes<T>(rows) ? lanes_of<T>(rows) : rows;
}

// Number of columns of O in scratch memory: whole pairs of vectors. Not a multiple of 1 KiB, because the rows of a
// register tile would be in the same few sets of the L1 cache.
template <class T>
constexpr int64_t decode_columns(int64_t n) {
  const int64_t columns = ceil_div(n, 2 * kLanes<T>) * (2 * kLanes<T>);
  return columns * sizeof(T) % 1024 == 0 ? columns + 2 * kLanes<T> : columns;
}

// Calls body(first row, count) for groups of four, two or one rows. `count` is a compile-time constant, so sums stay
// in registers.
template <class T, class Body>
inline void for_each_few_rows(int64_t rows, const Body& body) {
  constexpr int kMost = kLanes<T> < 4 ? kLanes<T> : 4;
  int64_t r = 0;
  for (; r + kMost <= rows; r += kMost) body(r, std::integral_constant<int, kMost>{});
  for (; r + 2 <= rows; r += 2) body(r, std::integral_constant<int, 2>{});
  for (; r < rows; ++r) body(r, std::integral_constant<int, 1>{});
}

// scores[r][n] = lanes[r * N + n], for n < room.
template <class T, int R, int N>
FA_INLINE void store_scores(const T* lanes, T* scores, int64_t ld, int64_t room) {
  const int64_t count = std::min<int64_t>(N, room);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    if (count == N)  // a copy of a constant size is no call
      std::memcpy(scores + r * ld, lanes + r * N, N * sizeof(T));
    else
      std::memcpy(scores + r * ld, lanes + r * N, count * sizeof(T));
  }
}

// scores[r][n] = scale * (the sum of the lanes of sum[r][n]), for n < room.
template <class T, int R, int N, class Sum>
FA_INLINE void store_dots(const Sum (&sum)[R][N], T scale, T* scores, int64_t ld, int64_t room) {
  constexpr int L = kLanes<T>;
  static_assert(R * N == kDotSums && kDotSums % L == 0);
  T lanes[kDotSums];
#pragma GCC unroll 16
  for (int first = 0; first < kDotSums; first += L) {
    Vec<T> flat[L];  // a copy, because sums stay in registers only if no code uses their address
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i)
      flat[i] = __builtin_convertvector(sum[(first + i) / N][(first + i) % N], Vec<T>);
    store<T>(lanes + first, sum_each<T>(flat) * scale);
  }
  store_scores<T, R, N>(lanes, scores, ld, room);
}

// scores[r][n] = scale * <q[r], k[n]> for R rows and kDotSums / R keys from j on. `room` scores are stored. For keys
// past `keys` the last key is read again, and their scores are not used. load() returns a vector of kCols columns of a
// key; Sum is a vector of sums. Reads kAtOnce keys column by column, then the next ones.
template <class T, int R, int kCols, class Sum = Vec<T>, int kAtOnce = kDotSums / R, class E, class In,
          class Load>
FA_INLINE void dot_block(const E* q, int64_t ldq, const Rows<In>& k, int64_t j, int64_t keys, T scale,
                         T* scores, int64_t ld, int64_t room, const Load& load, Prefetcher& ahead) {
  constexpr int L = kLanes<T>, N = kDotSums / R;
  const In* key_row[N];
  Sum sum[R][N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    key_row[n] = k.row(std::min<int64_t>(j + n, keys - 1));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r][n] = Sum{};
  }
#pragma GCC unroll 16
  for (int first = 0; first < N; first += kAtOnce) {
    for (int64_t c = 0; c < k.cols; c += kCols) {
      decltype(load_elements(q)) key[kAtOnce];
#pragma GCC unroll 16
      for (int n = 0; n < kAtOnce; ++n) key[n] = load(key_row[first + n] + c, k.cols - c);
      ahead.lines(lines_of<In>(kAtOnce * kCols));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto query = load_elements(q + r * ldq + c / kCols * L);
#pragma GCC unroll 16
        for (int n = 0; n < kAtOnce; ++n) sum[r][first + n] = add_product(sum[r][first + n], query, key[n]);
      }
    }
  }
  store_dots<T, R, N>(sum, scale, scores + j, ld, room - j);
}

// Computes the scores of R rows with dot_block(). `load`: see there.
template <class T, int R, int kCols, class E, class In, class Load>
FA_INLINE void score_rows(const E* q, int64_t ldq, const Rows<In>& k, int64_t keys, T scale, T* scores,
                          int64_t ld, int64_t room, const Load& load, Prefetcher& ahead) {
  constexpr int N = kDotSums / R, kFewKeys = 4;
  const auto score = [&](auto at_once) FA_INLINE_LAMBDA {
    for (int64_t j = 0; j < keys; j += N)
      dot_block<T, R, kCols, Vec<T>, at_once.value>(q, ldq, k, j, keys, scale, scores, ld, room, load, ahead);
  };
  // 16 keys at once push each other out of L1 if they are far apart. With 8 adjacent heads of D 128, 4 keys at once take 0.89
  // to 1.0 of the time (Zen 5). Near keys from L3 take 1.04.
  if constexpr (N > 2 * kFewKeys)
    if (are_far_rows(k.stride * static_cast<int64_t>(sizeof(In))))
      return score(std::integral_constant<int, kFewKeys>{});
  score(std::integral_constant<int, N>{});
}

// The most vectors of columns that P V of one or two rows sums in registers.
constexpr int kDecodeValueVectors = 8;

// out[r][c] += sum_j P[r][j] V[j][c] for R rows and NV vectors of columns from c on. With NV = 1 the vector may be
// partial.
template <class In, class T, int R, int NV>
FA_INLINE void value_block(const T* probs, int64_t ld, const Rows<In>& v, int64_t c, int64_t keys, T* out,
                           int64_t ldo, Prefetcher& ahead) {
  constexpr int L = kLanes<T>;
  Vec<T> sum[R][NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < NV; ++n) sum[r][n] = load<T>(out + r * ldo + c + n * L);
  for (int64_t j = 0; j < keys; ++j) {
    Vec<T> value[NV];
#pragma GCC unroll 16
    for (int n = 0; n < NV; ++n) value[n] = load_columns<T>(v.row(j) + c + n * L, NV > 1 ? L : v.cols - c);
    ahead.lines(lines_of<In>(NV * L));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec<T> prob = splat<T>(probs[r * ld + j]);
#pragma GCC unroll 16
      for (int n = 0; n < NV; ++n) sum[r][n] += prob * value[n];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < NV; ++n) store<T>(out + r * ldo + c + n * L, sum[r][n]);
}

template <class In, class T>
struct DecodeProducts {
  T* q;  // [rows][D]   rows of all heads of the task
  int64_t ldq;
  T scale;
  ManyRows<In, T> many;

  static DecodeProducts allocate(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads,
                                 int64_t block_k) {
    const int64_t ldq = round_up_to_lanes<T>(p.sizes.head_dim);
    return {arena.take<T>(heads * rows * ldq), ldq, product_scale<T>(p),
            ManyRows<In, T>::allocate(arena, p, rows, heads, block_k)};
  }

  void load_query(const AttentionParams& p, int64_t row, const In* src) const {
    ManyRowsOperands<In, T>::load_row(src, p.sizes.head_dim, q + row * ldq);
  }

  // Call after loading the queries of the task's head `n`.
  void finish_queries(const AttentionParams& p, int64_t n, int64_t rows) const {
    many.load_queries(p, n, q + n * rows * ldq, ldq, rows);
  }

  // Computes S for R rows. `room`: the number of scores that may be written per row.
  template <int R>
  void scores(int64_t row, const Rows<In>& k, int64_t keys, T* out, int64_t ld, int64_t room,
              Prefetcher& ahead) const {
    const auto load = [](const In* p, int64_t n) FA_INLINE_LAMBDA { return load_columns<T>(p, n); };
    score_rows<T, R, kLanes<T>>(q + row * ldq, ldq, k, keys, scale, out, ld, room, load, ahead);
  }

  // Prepares P of a tile before add_values().
  void finish_probs(int64_t, int64_t, const T*, int64_t) const {}

  // Adds P V for `keys` keys; the first is the tile's key j. `probs`: P of R rows; `row`: the first of
  // these rows.
  template <int R>
  void add_values(int64_t row, int64_t j, const T* probs, int64_t ld, const Rows<In>& v, int64_t keys, T* sum,
                  int64_t ldo, Prefetcher& ahead) const {
    constexpr int L = kLanes<T>, kWide = 16 / R < kDecodeValueVectors ? 16 / R : kDecodeValueVectors;
    probs += row * ld + j;
    int64_t c = 0;
    for (; c + kWide * L <= v.cols; c += kWide * L)
      value_block<In, T, R, kWide>(probs, ld, v, c, keys, sum, ldo, ahead);
    // 64 columns are half of the width with vectors of 16 lanes. One vector would wait for each multiply-add.
    for (; c + kWide / 2 * L <= v.cols; c += kWide / 2 * L)
      value_block<In, T, R, kWide / 2>(probs, ld, v, c, keys, sum, ldo, ahead);
    for (; c < v.cols; c += L) value_block<In, T, R, 1>(probs, ld, v, c, keys, sum, ldo, ahead);
  }
};

#if defined(FA_HAS_PAIRS)

// As value_block(), for elements that are multiplied in pairs of keys: NV times two vectors of columns.
template <int R, int NV, class In, class Sum>
FA_INLINE void value_pairs_block(const Pair* probs, int64_t ld, const Rows<In>& v, int64_t c, int64_t keys,
                                 Sum* out, int64_t ldo, Prefetcher& ahead) {
  constexpr int L = kLanes<float>;
  decltype(load_sums(out)) sum[R][2 * NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < 2 * NV; ++n) sum[r][n] = load_sums(out + r * ldo + c + n * L);
  const int64_t cols = NV > 1 ? 2 * L : v.cols - c;
  const auto add = [&](int64_t j, const auto& high_row) FA_INLINE_LAMBDA {
    ahead.lines(lines_of<In>(2 * NV * 2 * L));
    U32 value[2 * NV];
#pragma GCC unroll 16
    for (int n = 0; n < NV; ++n) {
      const int64_t at = c + n * 2 * L;
      interleave(load_pairs(v.row(j) + at, cols), high_row(at), value[2 * n], value[2 * n + 1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto prob = broadcast_element(probs + r * ld + j / 2);
#pragma GCC unroll 16
      for (int n = 0; n < 2 * NV; ++n) sum[r][n] = add_product(sum[r][n], prob, value[n]);
    }
  };
  int64_t j = 0;
  for (; j + 2 <= keys; j += 2)
    add(j, [&](int64_t at) FA_INLINE_LAMBDA { return load_pairs(v.row(j + 1) + at, cols); });
  if (j < keys) add(j, [](int64_t) FA_INLINE_LAMBDA { return U32{}; });
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < 2 * NV; ++n) store_sums(out + r * ldo + c + n * L, sum[r][n]);
}

// out += P V for R rows. P and V are pairs across the keys.
template <int R, class In, class Sum>
FA_INLINE void add_value_pairs(const Pair* probs, int64_t ld, const Rows<In>& v, int64_t keys, Sum* out,
                               int64_t ldo, Prefetcher& ahead) {
  // Pairs of vectors of columns. The sums of R rows fill half of the registers.
  constexpr int kCols = 2 * kLanes<float>, kMost = FA_VECTOR_REGISTERS / 4 / R, kWide = kMost < 4 ? kMost : 4;
  int64_t c = 0;
  for (; c + kWide * kCols <= v.cols; c += kWide * kCols)
    value_pairs_block<R, kWide>(probs, ld, v, c, keys, out, ldo, ahead);
  if constexpr (kWide > 1)  // as DecodeProducts::add_values()
    for (; c + kWide / 2 * kCols <= v.cols; c += kWide / 2 * kCols)
      value_pairs_block<R, kWide / 2>(probs, ld, v, c, keys, out, ldo, ahead);
  for (; c < v.cols; c += kCols) value_pairs_block<R, 1>(probs, ld, v, c, keys, out, ldo, ahead);
}

#endif

#if defined(FA_DOT_BFLOAT16)

template <>
struct DecodeProducts<BFloat16, float> {
  Pair* q;  // [rows][D / 2]   rows of all heads of the task
  int64_t ldq;
  Pair* prob_pairs;  // [rows][block_k / 2]   P, pairs along the keys
  float scale;
  ManyRows<BFloat16, float> many;

  static DecodeProducts allocate(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads,
                                 int64_t block_k) {
    const int64_t ldq = round_up_to_lanes<float>(pairs_of(p.sizes.head_dim));
    return {arena.take<Pair>(heads * rows * ldq), ldq, arena.take<Pair>(heads * rows * block_k / 2),
            product_scale<float>(p), ManyRows<BFloat16, float>::allocate(arena, p, rows, heads, block_k)};
  }

  void load_query(const AttentionParams& p, int64_t row, const BFloat16* src) const {
    ManyRowsOperands<BFloat16, float>::load_row(src, p.sizes.head_dim, q + row * ldq);
  }

  void finish_queries(const AttentionParams& p, int64_t n, int64_t rows) const {
    many.load_queries(p, n, q + n * rows * ldq, ldq, rows);
  }

  template <int R>
  void scores(int64_t row, const Rows<BFloat16>& k, int64_t keys, float* out, int64_t ld, int64_t room,
              Prefetcher& ahead) const {
    const auto load = [](const BFloat16* p, int64_t n) FA_INLINE_LAMBDA { return load_pairs(p, n); };
    score_rows<float, R, 2 * kLanes<float>>(q + row * ldq, ldq, k, keys, scale, out, ld, room, load, ahead);
  }

  // Rounds `rows` rows of P, from `row` on, to pairs. Padding lanes of P are 0.
  void finish_probs(int64_t row, int64_t rows, const float* probs, int64_t ld) const {
    for (int64_t n = row * ld; n < (row + rows) * ld; n += kLanes<float>)
      store_as<BFloat16, float>(reinterpret_cast<BFloat16*>(prob_pairs) + n, load<float>(probs + n));
  }

  template <int R>
  void add_values(int64_t row, int64_t j, const float*, int64_t ld, const Rows<BFloat16>& v, int64_t keys,
                  float* sum, int64_t ldo, Prefetcher& ahead) const {
    add_value_pairs<R>(prob_pairs + (row * ld + j) / 2, ld / 2, v, keys, sum, ldo, ahead);
  }
};

#endif
