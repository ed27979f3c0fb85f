// The five products of the backward on one tile: S = Q K^T, dP = dO V^T, dV += P^T dO, dK += dS^T Q, dQ += dS K. The
// first form has operands of the accumulator's type; 16-bit rows are widened when their tile is loaded. So float32,
// bfloat16 and float16 share one text.
//
// Order of the calls: load_keys() before the tiles of a key block. scores() and dprobs() before add_dv(), add_dk()
// and add_dq() of a tile, which reuse the rows of Q and dO.
#pragma once

#include "decode_products-inl.h"
#include "masked_gemm-inl.h"
#include "tile_gemm-inl.h"

// dQ of one head, or a sum of parts of dQ, in the accumulator's type.
template <class T>
struct DqRows {
  T* data;
  int64_t ld;
};

// Rows in the caller's memory. `dtype` is their type.
struct RowsInMemory {
  const void* data;
  int64_t stride, cols;
  DType dtype;

  static RowsInMemory of(const Tensor4& t, DType dtype, int64_t b, int64_t h, int64_t s, int64_t cols) {
    const int64_t first = b * t.stride_b + h * t.stride_h + s * t.stride_s;
    return {static_cast<const char*>(t.data) + first * bytes_of(dtype), t.stride_s, cols, dtype};
  }
  template <class Row>
  Rows<Row> as() const {
    return {static_cast<const Row*>(data), stride, cols};
  }
  RowsInMemory from(int64_t row) const {
    return {static_cast<const char*>(data) + row * stride * bytes_of(dtype), stride, cols, dtype};
  }
};

// The keys that are loaded. A tile may have a part of them.
struct KeyBlock {
  int64_t j0 = 0, ld = 0;  // ld: the keys in whole vectors

  int64_t first_key(const TileFrame& f) const { return f.j0 - j0; }
};

template <class In, class T>
struct BackwardProducts {
  T* k_transposed;  // [D][block_k]     K^T, unless multiplies_rows()
  T* v_transposed;  // [D_v][block_k]   likewise
  T* k_tile;        // [block_k][D]     only if the caller's memory cannot be read directly; also:
  T* q_tile;        // [block_q][D]
  T* dout_tile;     // [block_q][D_v]
  T* finite_tile;   // [max(block_q, block_k)][max(D, D_v)]  for masked_gemm
  Tile<T> k, q, dout;
  RowsInMemory key_rows, value_rows;  // of the key block
  KeyBlock block;

  // Whether S and dP are dot products of rows. With few queries, the transpositions of K and V take longer than the
  // products. Depends on the sequence's length alone. lse_is_exact() expects this order of sums after decode only.
  static bool multiplies_rows(const BackwardParams& p) {
    constexpr int64_t kFewQueries = 4;
    static_assert(kFewQueries <= kDecodeMaxQueries);
    return p.sizes.seqlen_q <= kFewQueries;
  }

  static BackwardProducts allocate(Arena& arena, const BackwardParams& p) {
    const auto [block_q, block_k] = fitted(backward_tiling<T>(), p.sizes);
    const int64_t d = round_up_to_lanes<T>(p.sizes.head_dim), d_v = round_up_to_lanes<T>(p.sizes.head_dim_v);
    BackwardProducts r{};
    r.k_transposed = arena.take<T>(p.sizes.head_dim * block_k);
    r.v_transposed = arena.take<T>(p.sizes.head_dim_v * block_k);
    r.k_tile = arena.take<T>(block_k * d);
    r.q_tile = arena.take<T>(block_q * d);
    r.dout_tile = arena.take<T>(block_q * d_v);
    r.finite_tile = arena.take<T>(std::max(block_q, block_k) * std::max(d, d_v));
    return r;
  }

  // Loads keys [j0, j0 + keys) of one head. K^T and V^T are padded with zeros to whole vectors of keys.
  void load_keys(const BackwardParams& p, int64_t b, int64_t h_kv, int64_t j0, int64_t keys) {
    key_rows = RowsInMemory::of(p.k, p.dtype, b, h_kv, j0, p.sizes.head_dim);
    value_rows = RowsInMemory::of(p.v, p.dtype, b, h_kv, j0, p.sizes.head_dim_v);
    block = {j0, round_up_to_lanes<T>(keys)};
    if (!multiplies_rows(p)) {
      const int64_t ld = block.ld;
      load_tile_transposed_of<In, T>(p.k, p.dtype, b, h_kv, j0, keys, key_rows.cols, k_transposed, ld);
      load_tile_transposed_of<In, T>(p.v, p.dtype, b, h_kv, j0, keys, value_rows.cols, v_transposed, ld);
    }
    k = load_tile_of<In, T>(p.k, p.dtype, b, h_kv, j0, keys, key_rows.cols, k_tile);
  }

  void scores(const BackwardParams& p, const TileFrame& f, T* out, bool accumulate = false) {
    q = load_tile_of<In, T>(p.q, p.dtype, f.b, f.h, f.i0, f.queries, p.sizes.head_dim, q_tile);
    if (multiplies_rows(p)) {
      T* to = accumulate ? finite_tile : out;
      multiply_rows(f, q, key_rows.from(block.first_key(f)), product_scale<T>(p), to);
      if (accumulate) add_rows<T>(out, to, f.queries * f.ld);
      return;
    }
    gemm<T>(f.queries, f.ld,
            {p.sizes.head_dim, q.data, q.ld, 1, k_transposed + block.first_key(f), block.ld, out, f.ld,
             accumulate, product_scale<T>(p)});
  }

  void dprobs(const BackwardParams& p, const TileFrame& f, T* out) {
    dout = load_tile_of<In, T>(p.dout, p.dtype, f.b, f.h, f.i0, f.queries, p.sizes.head_dim_v, dout_tile);
    if (multiplies_rows(p)) return multiply_rows(f, dout, value_rows.from(block.first_key(f)), T(1), out);
    gemm<T>(f.queries, f.ld,
            {p.sizes.head_dim_v, dout.data, dout.ld, 1, v_transposed + block.first_key(f), block.ld, out,
             f.ld, false});
  }

  void add_dv(const BackwardParams& p, const ScoreTile<T>& score, const T* probs, T* dv) const {
    const TileFrame& f = score.frame;
    const int64_t d_v = p.sizes.head_dim_v, ld = round_up_to_lanes<T>(d_v);
    masked_gemm<T>(score, true, f.keys, d_v,
                   {f.queries, probs, 1, f.ld, dout.data, dout.ld, dv + block.first_key(f) * ld, ld, true},
                   finite_tile);
  }

  void add_dk(const BackwardParams& p, const ScoreTile<T>& score, const T* dscores, T* dk) const {
    const TileFrame& f = score.frame;
    const int64_t d = p.sizes.head_dim, ld = round_up_to_lanes<T>(d);
    masked_gemm<T>(score, true, f.keys, d,
                   {f.queries, dscores, 1, f.ld, q.data, q.ld, dk + block.first_key(f) * ld, ld, true},
                   finite_tile);
  }

  void add_dq(const BackwardParams& p, const ScoreTile<T>& score, const T* dscores,
              const DqRows<T>& dq) const {
    const TileFrame& f = score.frame;
    masked_gemm<T>(score, false, f.queries, p.sizes.head_dim,
                   {f.keys, dscores, f.ld, 1, k.data + block.first_key(f) * k.ld, k.ld,
                    dq.data + f.i0 * dq.ld, dq.ld, true},
                   finite_tile);
  }

 private:
  // out[r][n] = scale * <left[r], right[n]>. Padding lanes repeat the last key.
  static void multiply_rows(const TileFrame& f, const Tile<T>& left, const RowsInMemory& right, T scale,
                            T* out) {
    for_row_type<In>(right.dtype, [&](auto element) {
      using Row = decltype(element);
      multiply_rows_as<Row>(f, left, right.as<Row>(), scale, out);
    });
  }
  template <class Row>
  static void multiply_rows_as(const TileFrame& f, const Tile<T>& left, const Rows<Row>& right, T scale,
                               T* out) {
    Prefetcher nothing;
    const auto load = [](const Row* p, int64_t n) FA_INLINE_LAMBDA { return load_columns<T>(p, n); };
    for_each_few_rows<T>(f.queries, [&](int64_t row, auto few) {
      for (int64_t j = 0; j < f.ld; j += kDotSums / few.value)
        dot_block<T, few.value, kLanes<T>>(left.data + row * left.ld, left.ld, right, j, f.keys, scale,
                                           out + row * f.ld, f.ld, f.ld, load, nothing);
    });
  }
};

#if defined(FA_DOT_BFLOAT16)

// The form for bfloat16 operands without widening. P and dS are rounded to bfloat16.
template <>
struct BackwardProducts<BFloat16, float> {
  Pair* k_transposed;  // [D / 2][block_k]
  Pair* v_transposed;  // [D_v / 2][block_k]
  Pair* k_across;      // [block_k / 2][D]
  Pair* q_rows;        // [block_q][D / 2]      only if the caller's memory is not in pairs; also:
  Pair* dout_rows;     // [block_q][D_v / 2]
  Pair* across;   // [max(block_q, block_k) / 2][max(D, D_v)]   dO or Q, or K without rows that are not finite
  Pair* weights;  // [block_q][block_k / 2], or [block_k][block_q / 2]   P or dS
  Rows<BFloat16> k;  // the key block
  KeyBlock block;

  static BackwardProducts allocate(Arena& arena, const BackwardParams& p) {
    const auto [block_q, block_k] = fitted(backward_tiling<float>(), p.sizes);
    const int64_t d = p.sizes.head_dim, d_v = p.sizes.head_dim_v;
    const auto padded = round_up_to_lanes<float>;
    BackwardProducts r{};
    r.k_transposed = arena.take<Pair>(pairs_of(d) * block_k);
    r.v_transposed = arena.take<Pair>(pairs_of(d_v) * block_k);
    r.k_across = arena.take<Pair>(pairs_of(block_k) * padded(d));
    r.q_rows = arena.take<Pair>(block_q * padded(pairs_of(d)));
    r.dout_rows = arena.take<Pair>(block_q * padded(pairs_of(d_v)));
    r.across = arena.take<Pair>(pairs_of(std::max(block_q, block_k)) * padded(std::max(d, d_v)));
    r.weights =
        arena.take<Pair>(std::max(LeftPairs::count(block_q, block_k), LeftPairs::count(block_k, block_q)));
    return r;
  }

  void load_keys(const BackwardParams& p, int64_t b, int64_t h_kv, int64_t j0, int64_t keys) {
    const int64_t d = p.sizes.head_dim;
    block = {j0, round_up_to_lanes<float>(keys)};
    k = {p.k.row<BFloat16>(b, h_kv, j0), p.k.stride_s, d};
    load_pairs_transposed(k.data, k.stride, keys, d, k_transposed, block.ld);
    load_pairs_transposed(p.v.row<BFloat16>(b, h_kv, j0), p.v.stride_s, keys, p.sizes.head_dim_v,
                          v_transposed, block.ld);
    load_pairs_across(k.data, k.stride, keys, d, k_across, round_up_to_lanes<float>(d));
  }

  void scores(const BackwardParams& p, const TileFrame& f, float* out, bool accumulate = false) const {
    const int64_t d = p.sizes.head_dim;
    const Tile<Pair> q =
        load_pair_rows(p.q.row<BFloat16>(f.b, f.h, f.i0), p.q.stride_s, f.queries, d, q_rows);
    gemm<float, Pair>(f.queries, f.ld,
                      {pairs_of(d), q.data, q.ld, 1, k_transposed + block.first_key(f), block.ld, out, f.ld,
                       accumulate, product_scale<float>(p)});
  }

  void dprobs(const BackwardParams& p, const TileFrame& f, float* out) const {
    const int64_t d_v = p.sizes.head_dim_v;
    const Tile<Pair> dout =
        load_pair_rows(p.dout.row<BFloat16>(f.b, f.h, f.i0), p.dout.stride_s, f.queries, d_v, dout_rows);
    gemm<float, Pair>(f.queries, f.ld,
                      {pairs_of(d_v), dout.data, dout.ld, 1, v_transposed + block.first_key(f), block.ld, out,
                       f.ld, false});
  }

  void add_dv(const BackwardParams& p, const ScoreTile<float>& score, const float* probs, float* dv) const {
    const TileFrame& f = score.frame;
    add_transposed(score, probs, {p.dout.row<BFloat16>(f.b, f.h, f.i0), p.dout.stride_s, p.sizes.head_dim_v},
                   dv);
  }

  void add_dk(const BackwardParams& p, const ScoreTile<float>& score, const float* dscores, float* dk) const {
    const TileFrame& f = score.frame;
    add_transposed(score, dscores, {p.q.row<BFloat16>(f.b, f.h, f.i0), p.q.stride_s, p.sizes.head_dim}, dk);
  }

  void add_dq(const BackwardParams&, const ScoreTile<float>& score, const float* dscores,
              const DqRows<float>& dq) const {
    const TileFrame& f = score.frame;
    const int64_t ld = round_up_to_lanes<float>(k.cols), first = block.first_key(f);
    const Rows<BFloat16> rows{k.row(first), k.stride, k.cols};
    float* sum = dq.data + f.i0 * dq.ld;
    const bool clear = score.partial && !rows_are_finite<BFloat16, float>(rows, f.keys);
    if (clear) {  // clears a copy: other tiles need the key block unchanged
      load_pairs_across(rows.data, rows.stride, f.keys, k.cols, across, ld);
      clear_rows_not_finite(rows, f.keys, across, ld);
    }
    // Padding lanes of dS are 0, so an odd number of keys may end with half a pair.
    for (int64_t n = 0; n < f.queries * f.ld; n += kLanes<float>)
      store_as<BFloat16, float>(reinterpret_cast<BFloat16*>(weights) + n, load<float>(dscores + n));
    gemm<float, Pair>(f.queries, k.cols,
                      {pairs_of(f.keys), weights, f.ld / 2, 1, clear ? across : k_across + first / 2 * ld, ld,
                       sum, dq.ld, true});
    if (clear)
      add_rows_not_finite<BFloat16, float>(score, false, f.queries, dscores, f.ld, 1, rows, f.keys, sum,
                                           dq.ld);
  }

 private:
  // sum[key] += sum over queries of factor[query][key] * rows[query]
  void add_transposed(const ScoreTile<float>& score, const float* factor, const Rows<BFloat16>& rows,
                      float* sum) const {
    const TileFrame& f = score.frame;
    const int64_t ld = round_up_to_lanes<float>(rows.cols);
    load_pairs_across(rows.data, rows.stride, f.queries, rows.cols, across, ld);
    const bool cleared = score.partial && clear_rows_not_finite(rows, f.queries, across, ld);
    const LeftPairs left = transposed_pairs(factor, f.queries, f.ld, weights);
    sum += block.first_key(f) * ld;
    gemm<float, Pair>(f.keys, rows.cols,
                      {pairs_of(f.queries), left.data, left.row, left.depth, across, ld, sum, ld, true});
    if (cleared)
      add_rows_not_finite<BFloat16, float>(score, true, f.keys, factor, 1, f.ld, rows, f.queries, sum, ld);
  }
};

#endif
