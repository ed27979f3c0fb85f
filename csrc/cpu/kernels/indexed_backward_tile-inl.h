// Recomputes P and dS of one tile of attention by index, S^T and dP^T with the heads as lanes:
//
//   P = e^(S - lse)    dP = dO V^T    dS = P o (dP - delta)    delta = rowsum(dO o O) - dlse
//
// Dropout multiplies dP, and P after dS, by its factors.
#pragma once

#include "backward-inl.h"
#include "head_products-inl.h"
#include "indexed-inl.h"

// Scratch of one thread. The second products are the first products with other operands: dO V^T in place of Q K^T, dS K
// in place of P V.
template <class In, class T>
struct IndexedBackwardScratch {
  KeyTile<In, T> tile;
  In *q, *dout;                                  // [heads][D], [heads][D_v]   if Q and dO are widened
  HeadScores<In, T>*q_products, *dout_products;  // of each block of heads
  HeadProducts<In, T>*q_heads, *dout_heads;      // likewise
  T *probs, *dscores;                            // [keys][block of heads]   S, then P; dP, then dS
  T* tanh_tile;                                  // likewise, only with softcap
  RowTerms<T> rows;                              // [heads], of the query row
  T* dq;                                         // [heads][D]
  T *dk_tile, *dv_tile;                          // [keys][D], [keys][D_v]
  T* dslopes;                                    // [heads], of the task
  T *dk, *dv;                                    // rows of the task's keys; null: not wanted
};

template <class In, class T>
HeadProducts<In, T>* allocate_head_products(Arena& arena, int64_t blocks, int64_t cols) {
  auto* products = arena.take<HeadProducts<In, T>>(blocks);
  for (int64_t n = 0; n < blocks; ++n) {
    const auto own = HeadProducts<In, T>::allocate(arena, cols);
    if (products) products[n] = own;
  }
  return products;
}

// The call with the products dO V^T and dS K.
inline AttentionParams with_operands_of_dprobs(const AttentionParams& row, const Tensor4& dout) {
  AttentionParams swapped = row;
  swapped.q = dout;
  swapped.k = row.v;
  swapped.v = row.k;
  std::swap(swapped.sizes.head_dim, swapped.sizes.head_dim_v);
  return swapped;
}

// `keys`: the largest number of keys of a task.
template <class In, class T>
IndexedBackwardScratch<In, T> allocate_indexed_backward(Arena& arena, const BackwardParams& p, int64_t keys) {
  AttentionParams row;
  row.sizes = sizes_of_gathered(p.sizes);
  const int64_t blocks = count_head_blocks(p.sizes), block = kGatheredKeys * block_of_heads();
  const int64_t heads = row.sizes.seqlen_q + block_of_heads();
  const int64_t d = round_up_to_lanes<T>(p.sizes.head_dim), d_v = round_up_to_lanes<T>(p.sizes.head_dim_v);
  IndexedBackwardScratch<In, T> s;
  s.tile = KeyTile<In, T>::allocate(arena, p);
  s.q = arena.take<In>(heads * d);
  s.dout = arena.take<In>(heads * d_v);
  s.q_products = allocate_products<In, T>(arena, row);
  s.dout_products = allocate_products<In, T>(arena, with_operands_of_dprobs(row, {}));
  s.q_heads = allocate_head_products<In, T>(arena, blocks, p.sizes.head_dim);
  s.dout_heads = allocate_head_products<In, T>(arena, blocks, p.sizes.head_dim_v);
  s.probs = arena.take<T>(block);
  s.dscores = arena.take<T>(block);
  s.tanh_tile = p.softcap > 0 ? arena.take<T>(block) : nullptr;
  s.rows = {arena.take<T>(heads), arena.take<T>(heads), arena.take<T>(heads)};
  s.dq = arena.take<T>(heads * d);
  s.dk_tile = arena.take<T>(kGatheredKeys * d);
  s.dv_tile = arena.take<T>(kGatheredKeys * d_v);
  s.dslopes = p.dalibi_slopes ? arena.take<T>(heads) : nullptr;
  s.dk = p.dk ? arena.take<T>(keys * d) : nullptr;
  s.dv = p.dv ? arena.take<T>(keys * d_v) : nullptr;
  return s;
}

// One query row of one key head.
template <class In, class T>
struct IndexedBackwardRow {
  const IndexedBackwardParams& p;
  IndexedBackwardScratch<In, T>& s;
  int64_t b, h_kv, i;
  AttentionParams row = call_of_row<In>(p), swapped = {};
  Tensor4 dout = {};

  const int64_t heads = row.sizes.seqlen_q, first_head = h_kv * heads, blocks = count_head_blocks(p.sizes);

  void load_queries() {
    row.q = rows_of_heads<In>(p.q, p.dtype, b, first_head, i, heads, p.sizes.head_dim, s.q);
    dout = rows_of_heads<In>(p.dout, p.dtype, b, first_head, i, heads, p.sizes.head_dim_v, s.dout);
    for (int64_t n = 0; n < blocks; ++n) {
      const TileFrame f = frame_of_heads<T>(row, n, 0);
      const AttentionParams of_dprobs = with_operands_of_dprobs(row, dout);
      s.q_products[n].load_queries(row, f.i0, f.queries, f.ld);
      s.dout_products[n].load_queries(of_dprobs, f.i0, f.queries, f.ld);
      s.q_heads[n].load_heads(row.q, f.i0, f.queries);
      s.dout_heads[n].load_heads(dout, f.i0, f.queries);
    }
  }

  // `following`: the keys of the next row. The products of a tile do not read row.q and dout, which may be unknown.
  bool next_tile(KeyCursor& cursor, const KeyCursor& following) {
    if (!s.tile.load(p, b, h_kv, cursor, following)) return false;
    row.k = s.tile.k;
    row.v = s.tile.v;
    swapped = with_operands_of_dprobs(row, dout);
    return true;
  }

  // Fills s.probs with the scores, s.dscores with dP, and s.tile.dropout.
  ScoreTile<T> recompute_scores(const TileFrame& f, int64_t n) const {
    const MaskTile<T> mask = gathered_mask<T>(p, b, first_head + f.i0, i, s.tile.keys, f, s.tile.bias);
    RowsAhead keys_ahead = s.tile.keys_ahead(p, b, h_kv), values_ahead = s.tile.values_ahead(p, b, h_kv);
    const int64_t key_lines = n == 0 ? keys_ahead.count() : 0,
                  value_lines = n == 0 ? values_ahead.count() : 0;
    s.q_products[n].scores(row, f, product_scale<T>(p), s.probs, keys_ahead, key_lines);
    const ScoreTile<T> score = finish_scores<T>(row, f, mask, s.probs, s.tanh_tile);
    s.dout_products[n].scores(swapped, f, T(1), s.dscores, values_ahead, value_lines);
    if (p.dropout) {
      s.tile.load_dropout(p, b, first_head + f.i0, i, f);
      multiply_rows<T>(s.dscores, s.tile.dropout, f.keys * f.ld);
    }
    return score;
  }

  // Fills s.probs with P and s.dscores with dS.
  ScoreTile<T> recompute(const TileFrame& f, int64_t n) const {
    const ScoreTile<T> score = recompute_scores(f, n);
    for (int64_t c = 0; c < f.ld; c += kLanes<T>) {
      const Vec<T> delta = load<T>(s.rows.delta + f.i0 + c), reference = load<T>(s.rows.reference + f.i0 + c),
                   correction = load<T>(s.rows.correction + f.i0 + c);
      for (int64_t r = 0; r < f.keys; ++r) {
        T *prob = s.probs + r * f.ld + c, *dscore = s.dscores + r * f.ld + c;
        const Vec<T> x = load<T>(prob);
        const VecIndex<T> hidden = x == kNegInf<T>;  // masked or padding: dS is 0 for every dP
        const Vec<T> e = prob_of<In, T>(x, reference, correction);
        store<T>(prob, e);
        store<T>(dscore, hidden ? Vec<T>{} : e * (load<T>(dscore) - delta));
      }
    }
    if (p.dropout) multiply_rows<T>(s.probs, s.tile.dropout, f.keys * f.ld);
    return score;
  }

  // dslope -= dS |i + diagonal - j|, summed over the keys of the tile.
  void add_slope_gradients(const TileFrame& f) const {
    for (int64_t r = 0; r < f.keys; ++r) {
      const T distance = std::abs(static_cast<T>(i + p.band.diagonal - s.tile.keys[r]));
      for (int64_t c = 0; c < f.queries; ++c) s.dslopes[f.i0 + c] -= s.dscores[r * f.ld + c] * distance;
    }
  }

  // Writes sums to s.rows, as sum_row_terms() of the dense backward: m, l, and l rowsum(P o dP).
  void sum_row_terms(KeyCursor cursor) {
    for (int64_t c = 0; c < heads; ++c) {
      const RowStart<T> start = start_of_row<T>(p.sink, b, first_head + c);
      s.rows.reference[c] = start.max;
      s.rows.correction[c] = start.sum;
      s.rows.delta[c] = T(0);
    }
    load_queries();
    while (next_tile(cursor, cursor))
      for (int64_t n = 0; n < blocks; ++n) {
        const TileFrame f = frame_of_heads<T>(row, n, s.tile.count);
        recompute_scores(f, n);
        for (int64_t c = 0; c < f.queries; ++c) add_to_terms_of_head(f, c);
      }
  }

 private:
  void add_to_terms_of_head(const TileFrame& f, int64_t c) const {
    T &reference = s.rows.reference[f.i0 + c], &sum = s.rows.correction[f.i0 + c],
      &weighted = s.rows.delta[f.i0 + c], new_max = reference;
    for (int64_t r = 0; r < f.keys; ++r) new_max = std::max(new_max, s.probs[r * f.ld + c]);
    if (new_max == kNegInf<T>) return;
    const T rescale = std::exp(reference - new_max);
    sum *= rescale;
    weighted *= rescale;
    for (int64_t r = 0; r < f.keys; ++r) {
      const T x = s.probs[r * f.ld + c];
      if (x == kNegInf<T>) continue;
      const T e = std::exp(x - new_max);
      sum += e;
      weighted += e * s.dscores[r * f.ld + c];
    }
    reference = new_max;
  }
};
