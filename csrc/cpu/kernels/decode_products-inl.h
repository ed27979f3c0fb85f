// The two products of decode, S = Q K^T and O += P V, in two forms. A few rows of Q at a time: the sums of S run along
// the lanes, K and V are read where the caller has them, and `next` rows are asked for meanwhile. Or, where rows fill
// more than half a vector, all of them at once by the forward's matrix product: S^T with a lane for each row, which then
// is transposed.
#pragma once

#include "cache_rows-inl.h"
#include "gemm-inl.h"
#include "pairs-inl.h"
#include "scores-inl.h"

// Whether so many rows of Q are multiplied all at once. Thousands of them, where the caller asks for splits of a long
// prompt, would need as much memory again.
constexpr int64_t kMostRowsAtOnce = 512;
template <class T>
constexpr bool fills_lanes(int64_t rows) {
  return rows > kLanes<T> / 2 && rows <= kMostRowsAtOnce;
}

// Columns of O in scratch: whole pairs of vectors.
template <class T>
constexpr int64_t decode_columns(int64_t n) {
  return ceil_div(n, 2 * kLanes<T>) * (2 * kLanes<T>);
}

// Calls body(first row, number of rows) with four, two or one rows at a time, a number that registers can
// hold; the number is a compile-time constant there.
template <class T, class Body>
inline void for_each_few_rows(int64_t rows, const Body& body) {
  constexpr int kMost = kLanes<T> < 4 ? kLanes<T> : 4;
  int64_t r = 0;
  for (; r + kMost <= rows; r += kMost) body(r, std::integral_constant<int, kMost>{});
  for (; r + 2 <= rows; r += 2) body(r, std::integral_constant<int, 2>{});
  for (; r < rows; ++r) body(r, std::integral_constant<int, 1>{});
}

// The sums of a dot_block: half the registers. One reduction finishes as many of them as a vector has lanes.
constexpr int kDotSums = FA_VECTOR_REGISTERS / 2;

// scores[r][n] = scale * <q[r], k[n]> for R rows and kDotSums / R keys. Keys past `keys` read the last one
// again; nobody looks at their scores. `load` makes a vector of elements E of a key's columns, kCols of them.
template <class T, int R, int kCols, class E, class In, class Load>
FA_INLINE void dot_block(const E* q, int64_t ldq, const TileRows<In>& k, int64_t j, int64_t keys, T scale,
                         T* scores, int64_t ld, const Load& load) {
  constexpr int L = kLanes<T>, N = kDotSums / R;
  static_assert(kDotSums % L == 0);
  const In* key_row[N];
  Vec<T> sum[R][N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    key_row[n] = k.row(std::min<int64_t>(j + n, keys - 1));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sum[r][n] = Vec<T>{};
  }
  for (int64_t c = 0; c < k.cols; c += kCols) {
    decltype(load_elements(q)) key[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) key[n] = load(key_row[n] + c, k.cols - c);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto query = load_elements(q + r * ldq + c / kCols * L);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[r][n] = multiply_add(sum[r][n], query, key[n]);
    }
  }
  T lanes[kDotSums];
#pragma GCC unroll 16
  for (int first = 0; first < kDotSums; first += L) {
    Vec<T> flat[L];  // a copy: the sums themselves stay in registers only if nothing takes their address
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) flat[i] = sum[(first + i) / N][(first + i) % N];
    store<T>(lanes + first, sum_each<T>(flat) * scale);
  }
  const int64_t count = std::min<int64_t>(N, ld - j);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    if (count == N)
      std::memcpy(scores + r * ld + j, lanes + r * N, N * sizeof(T));
    else
      std::memcpy(scores + r * ld + j, lanes + r * N, count * sizeof(T));
  }
}

// out[r][c] += sum_j P[r][j] V[j][c] for R rows and NV vectors of columns from c on; a single one may be cut
// off.
template <class In, class T, int R, int NV>
FA_INLINE void value_block(const T* probs, int64_t ld, const Rows<In>& v, int64_t c, int64_t keys, T* out,
                           int64_t ldo) {
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

// A tile's share of O, which is added to O as a whole: over many tiles that rounds like a sum of tiles, not
// like one chain of all keys.
template <class T>
struct TileSum {
  T* data;  // [4][D_v], the most rows at a time

  static TileSum plan(Arena& arena, const AttentionParams& p) {
    return {arena.take<T>(4 * decode_columns<T>(p.sizes.head_dim_v))};
  }
  template <int R>
  T* begin(int64_t ld) const {
    std::fill(data, data + R * ld, T(0));
    return data;
  }
};

// What the form for many rows keeps; rows in whole vectors, those of the sequence at hand. E: T, or Pair.
template <class E, class T>
struct ManyRows {
  E* q;       // [heads of a task][D][rows]   Q^T
  T* scores;  // [block_k][rows]              S^T
  E* k_tile;  // [block_k][D]                 only if the caller's k cannot be read directly
  E* v_tile;  // [block_k][D_v]               likewise; Pair: pairs across the keys

  static ManyRows plan(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads, int64_t block_k,
                       int64_t depth) {
    ManyRows m{};
    rows = std::min<int64_t>(rows, kMostRowsAtOnce);  // of a shorter sequence
    if (!fills_lanes<T>(rows)) return m;
    const int64_t lanes = round_up_to_lanes<T>(rows);
    m.q = arena.take<E>(heads * depth * lanes);
    m.scores = arena.take<T>(block_k * lanes);
    m.k_tile = arena.take<E>(block_k * round_up_to_lanes<T>(depth));
    m.v_tile = arena.take<E>(block_k * decode_columns<T>(p.sizes.head_dim_v));
    return m;
  }
};

template <class In, class T>
struct DecodeProducts {
  T* q;  // [rows][D]   rows: of all heads of a task
  int64_t ldq;
  T scale;
  TileSum<T> tile_sum;
  ManyRows<T, T> many;

  static DecodeProducts plan(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads,
                             int64_t block_k) {
    const int64_t ldq = round_up_to_lanes<T>(p.sizes.head_dim);
    return {arena.take<T>(heads * rows * ldq), ldq, product_scale<T>(p), TileSum<T>::plan(arena, p),
            ManyRows<T, T>::plan(arena, p, rows, heads, block_k, p.sizes.head_dim)};
  }

  void load_query(const AttentionParams& p, int64_t row, const In* src) const {
    for (int64_t c = 0; c < p.sizes.head_dim; c += kLanes<T>)
      store<T>(q + row * ldq + c, load_columns<T>(src + c, p.sizes.head_dim - c));
  }

  // After the queries of head `n` of the task.
  void finish_queries(const AttentionParams& p, int64_t n, int64_t rows) const {
    if (!fills_lanes<T>(rows)) return;
    const int64_t depth = p.sizes.head_dim, lanes = round_up_to_lanes<T>(rows);
    load_tile_transposed<T, T>(q + n * rows * ldq, ldq, rows, depth, many.q + n * depth * lanes, lanes);
  }

  template <int R>
  void scores(int64_t row, const TileRows<In>& k, int64_t keys, T* out, int64_t ld,
              const SourceRows& next) const {
    constexpr int N = kDotSums / R;
    const auto load = [](const In* p, int64_t n) FA_INLINE_LAMBDA { return load_columns<T>(p, n); };
    for (int64_t j = 0; j < keys; j += N) {
      next.prefetch(j, j + N);
      dot_block<T, R, kLanes<T>>(q + row * ldq, ldq, k, j, keys, scale, out, ld, load);
    }
  }

  // S of all rows of head `n`.
  void all_scores(int64_t n, int64_t rows, const TileRows<In>& k, int64_t keys, T* out, int64_t ld,
                  const SourceRows& next) const {
    const int64_t lanes = round_up_to_lanes<T>(rows);
    const T* queries = many.q + n * k.cols * lanes;
    const int64_t step = k.is_whole() ? keys : kChunkRows;
    next.prefetch(0, keys);
    for (int64_t j = 0; j < keys; j += step) {
      const int64_t count = std::min(step, keys - j);
      const Tile<T> tile = load_tile<In, T>(k.row(j), k.stride, count, k.cols, many.k_tile);
      gemm<T>(count, lanes,
              {k.cols, tile.data, tile.ld, 1, queries, lanes, many.scores + j * lanes, lanes, false, scale});
    }
    load_tile_transposed<T, T>(many.scores, lanes, keys, rows, out, ld);
  }

  template <int R>
  void add_values(const T* probs, int64_t ld, const TileRows<In>& v, int64_t keys, T* out, int64_t ldo,
                  const SourceRows& next) const {
    constexpr int L = kLanes<T>, kWide = 16 / R < 8 ? 16 / R : 8;
    T* sum = tile_sum.template begin<R>(ldo);
    for (int64_t j = 0; j < keys; j += kChunkRows) {
      const int64_t count = std::min(kChunkRows, keys - j);
      const Rows<In> here = v.from(j);
      next.prefetch(j, j + count);
      int64_t c = 0;
      for (; c + kWide * L <= v.cols; c += kWide * L)
        value_block<In, T, R, kWide>(probs + j, ld, here, c, count, sum, ldo);
      for (; c < v.cols; c += L) value_block<In, T, R, 1>(probs + j, ld, here, c, count, sum, ldo);
    }
    add_rows<T>(out, sum, R * ldo);
  }

  // The whole tile in one product, wherever its chunks lie: the sums are the same then.
  void add_all_values(int64_t rows, const T* probs, int64_t ld, const TileRows<In>& v, int64_t keys, T* out,
                      int64_t ldo, const SourceRows& next) const {
    constexpr bool kInPlace = std::is_same_v<In, T>;
    const int64_t width = round_up_to_lanes<T>(v.cols);
    next.prefetch(0, keys);
    Tile<T> tile{many.v_tile, width};
    if (kInPlace && v.cols % kLanes<T> == 0 && v.is_whole()) {
      tile = load_tile<In, T>(v.row(0), v.stride, keys, v.cols, many.v_tile);
    } else {
      for (int64_t n = 0; n < keys; ++n)
        for (int64_t c = 0; c < v.cols; c += kLanes<T>)
          store<T>(many.v_tile + n * width + c, load_columns<T>(v.row(n) + c, v.cols - c));
    }
    gemm<T>(rows, v.cols, {keys, probs, ld, 1, tile.data, tile.ld, out, ldo, true});
  }
};

#if defined(FA_DOT_BFLOAT16)

// As value_block(), for bfloat16 as it is: pairs of keys, NV times two vectors of columns.
template <int R, int NV>
FA_INLINE void value_pairs_block(const Pair* probs, int64_t ld, const Rows<BFloat16>& v, int64_t c,
                                 int64_t keys, float* out, int64_t ldo) {
  constexpr int L = kLanes<float>;
  F32 sum[R][2 * NV];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < 2 * NV; ++n) sum[r][n] = load<float>(out + r * ldo + c + n * L);
  for (int64_t j = 0; j < keys; j += 2) {
    U32 value[2 * NV];
#pragma GCC unroll 16
    for (int n = 0; n < NV; ++n) {
      const int64_t at = c + n * 2 * L;
      const U32 low = load_pairs(v.row(j) + at, v.cols - at);
      const U32 high = j + 1 < keys ? load_pairs(v.row(j + 1) + at, v.cols - at) : U32{};
      interleave(low, high, value[2 * n], value[2 * n + 1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const U32 prob = broadcast_element(probs + r * ld + j / 2);
#pragma GCC unroll 16
      for (int n = 0; n < 2 * NV; ++n) sum[r][n] = multiply_add(sum[r][n], prob, value[n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < 2 * NV; ++n) store<float>(out + r * ldo + c + n * L, sum[r][n]);
}

template <>
struct DecodeProducts<BFloat16, float> {
  Pair* q;  // [rows][D / 2]   rows: of all heads of a task
  int64_t ldq;
  Pair* prob_pairs;  // [rows at a time][block_k / 2]   P, pairs along the keys
  float scale;
  TileSum<float> tile_sum;
  ManyRows<Pair, float> many;

  static DecodeProducts plan(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads,
                             int64_t block_k) {
    const int64_t ldq = round_up_to_lanes<float>(pairs_of(p.sizes.head_dim));
    const int64_t block = std::max<int64_t>(std::min(rows, kMostRowsAtOnce), 4);
    return {arena.take<Pair>(heads * rows * ldq),
            ldq,
            arena.take<Pair>(block * block_k / 2),
            product_scale<float>(p),
            TileSum<float>::plan(arena, p),
            ManyRows<Pair, float>::plan(arena, p, rows, heads, block_k, pairs_of(p.sizes.head_dim))};
  }

  void load_query(const AttentionParams& p, int64_t row, const BFloat16* src) const {
    for (int64_t c = 0; c < p.sizes.head_dim; c += 2 * kLanes<float>)
      store_elements(q + row * ldq + c / 2, load_pairs(src + c, p.sizes.head_dim - c));
  }

  void finish_queries(const AttentionParams& p, int64_t n, int64_t rows) const {
    if (!fills_lanes<float>(rows)) return;
    const int64_t depth = pairs_of(p.sizes.head_dim), lanes = round_up_to_lanes<float>(rows);
    load_pairs_transposed(reinterpret_cast<const BFloat16*>(q + n * rows * ldq), 2 * ldq, rows, 2 * depth,
                          many.q + n * depth * lanes, lanes);
  }

  template <int R>
  void scores(int64_t row, const TileRows<BFloat16>& k, int64_t keys, float* out, int64_t ld,
              const SourceRows& next) const {
    constexpr int N = kDotSums / R;
    const auto load = [](const BFloat16* p, int64_t n) FA_INLINE_LAMBDA { return load_pairs(p, n); };
    for (int64_t j = 0; j < keys; j += N) {
      next.prefetch(j, j + N);
      dot_block<float, R, 2 * kLanes<float>>(q + row * ldq, ldq, k, j, keys, scale, out, ld, load);
    }
  }

  void all_scores(int64_t n, int64_t rows, const TileRows<BFloat16>& k, int64_t keys, float* out, int64_t ld,
                  const SourceRows& next) const {
    const int64_t depth = pairs_of(k.cols), step = k.is_whole() ? keys : kChunkRows;
    const int64_t lanes = round_up_to_lanes<float>(rows);
    const Pair* queries = many.q + n * depth * lanes;
    next.prefetch(0, keys);
    for (int64_t j = 0; j < keys; j += step) {
      const int64_t count = std::min(step, keys - j);
      const Tile<Pair> tile = load_pair_rows(k.row(j), k.stride, count, k.cols, many.k_tile);
      gemm<float, Pair>(
          count, lanes,
          {depth, tile.data, tile.ld, 1, queries, lanes, many.scores + j * lanes, lanes, false, scale});
    }
    load_tile_transposed<float, float>(many.scores, lanes, keys, rows, out, ld);
  }

  template <int R>
  void add_values(const float* probs, int64_t ld, const TileRows<BFloat16>& v, int64_t keys, float* out,
                  int64_t ldo, const SourceRows& next) const {
    constexpr int kCols = 2 * kLanes<float>, kWide = 8 / R < 4 ? 8 / R : 4;
    round_probs(probs, R * ld);
    float* sum = tile_sum.template begin<R>(ldo);
    for (int64_t j = 0; j < keys; j += kChunkRows) {
      const int64_t count = std::min(kChunkRows, keys - j);
      const Rows<BFloat16> here = v.from(j);
      next.prefetch(j, j + count);
      int64_t c = 0;
      for (; c + kWide * kCols <= v.cols; c += kWide * kCols)
        value_pairs_block<R, kWide>(prob_pairs + j / 2, ld / 2, here, c, count, sum, ldo);
      for (; c < v.cols; c += kCols)
        value_pairs_block<R, 1>(prob_pairs + j / 2, ld / 2, here, c, count, sum, ldo);
    }
    add_rows<float>(out, sum, R * ldo);
  }

  void add_all_values(int64_t rows, const float* probs, int64_t ld, const TileRows<BFloat16>& v, int64_t keys,
                      float* out, int64_t ldo, const SourceRows& next) const {
    const int64_t width = round_up_to_lanes<float>(v.cols);
    next.prefetch(0, keys);
    round_probs(probs, rows * ld);
    for (int64_t j = 0; j < keys; j += kChunkRows)
      load_pairs_across(v.row(j), v.stride, std::min(kChunkRows, keys - j), v.cols,
                        many.v_tile + j / 2 * width, width);
    gemm<float, Pair>(rows, v.cols,
                      {pairs_of(keys), prob_pairs, ld / 2, 1, many.v_tile, width, out, ldo, true});
  }

 private:
  void round_probs(const float* probs, int64_t count) const {  // padding lanes of P are 0
    for (int64_t n = 0; n < count; n += kLanes<float>)
      store_as<BFloat16, float>(reinterpret_cast<BFloat16*>(prob_pairs) + n, load<float>(probs + n));
  }
};

#endif
