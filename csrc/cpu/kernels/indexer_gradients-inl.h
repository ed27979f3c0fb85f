// The gradients of the indexer's scores, for one query and a tile of keys. With S[j][h] = scale <q[h], k[j]> and the
// gradients dscore[j]:
//
//   dw[h] += sum_j dscore[j] relu(S[j][h])      G[j][h] = dscore[j] w[h] scale, or 0 where S[j][h] <= 0
//   dq    += G^T K_tile                         dk_tile += G Q
//
// All operands have the accumulator's type. Many queries add to a row of dk. Parts of dk fix the order of the sum: part
// n has the blocks of queries n, n + kIndexerParts, ... in order, and the parts are added in order.
#pragma once

#include "indexer_products-inl.h"

constexpr int64_t kIndexerParts = 8;

inline int64_t indexer_parts(const IndexerParams& p) {
  return std::min(kIndexerParts, ceil_div(p.seqlen_q, kIndexerBlockQ));
}

// Rows of keys, queries and products in the accumulator's type, for passes that need the values of S, not only their
// order.
template <class T>
struct IndexerTile {
  int64_t ld, d;    // ld: H_I, d: D_I, both rounded up to whole vectors
  T* q_transposed;  // [D_I][ld]
  T* q_copy;        // [H_I][d]
  T* k_tile;        // [kIndexerBlockK][d]
  T* s;             // [kIndexerBlockK][ld]
  T* weights;       // [ld]
  T* scores;        // [kIndexerBlockK]
  int64_t b = 0, i = 0;

  static IndexerTile allocate(Arena& arena, const IndexerParams& p) {
    IndexerTile t;
    t.ld = round_up_to_lanes<T>(p.heads);
    t.d = round_up_to_lanes<T>(p.head_dim);
    t.q_transposed = arena.take<T>(p.head_dim * t.ld);
    t.q_copy = arena.take<T>(p.heads * t.d);
    t.k_tile = arena.take<T>(kIndexerBlockK * t.d);
    t.s = arena.take<T>(kIndexerBlockK * t.ld);
    t.weights = arena.take<T>(t.ld);
    t.scores = arena.take<T>(kIndexerBlockK + kLanes<T>);
    return t;
  }

  void load_query(const IndexerParams& p, int64_t b_, int64_t i_) {
    b = b_;
    i = i_;
    for_row_type<T>(p.dtype, [&](auto element) {
      using In = decltype(element);
      load_tile_transposed<In, T>(p.q.row<In>(b, 0, i), p.q.stride_h, p.heads, p.head_dim, q_transposed, ld);
    });
    load_indexer_weights<T>(p, b, i, weights, ld);
  }

  // Copies the key j to row r of the tile. In: the type of the keys.
  template <class In>
  void load_key(const IndexerParams& p, int64_t batch, int64_t j, int64_t r) const {
    const Tile<T> row =
        load_tile<In, T>(p.key_row<In>(batch, j), p.k.stride_s, 1, p.head_dim, k_tile + r * d);
    if (row.data != k_tile + r * d) std::copy(row.data, row.data + d, k_tile + r * d);
  }

  // Computes S and the scores of rows [first, first + keys) of the tile, from index 0 on.
  void compute_scores(const IndexerParams& p, int64_t first, int64_t keys) const {
    gemm<T>(keys, ld,
            {p.head_dim, k_tile + first * d, d, 1, q_transposed, ld, s, ld, false, static_cast<T>(p.scale)});
    weigh_heads<T>(s, keys, p.heads, ld, weights, scores);
  }
};

// Sums of one query over its keys.
template <class T>
struct QueryGradients {
  T* dq;        // [H_I][d]
  T* dweights;  // [ld]

  static QueryGradients allocate(Arena& arena, const IndexerParams& p) {
    return {arena.take<T>(p.heads * round_up_to_lanes<T>(p.head_dim)),
            arena.take<T>(round_up_to_lanes<T>(p.heads))};
  }
  void clear(const IndexerParams& p) const {
    std::fill(dq, dq + p.heads * round_up_to_lanes<T>(p.head_dim), T(0));
    std::fill(dweights, dweights + round_up_to_lanes<T>(p.heads), T(0));
  }
  void store_to(const IndexerParams& p, const IndexerGradients& to, int64_t b, int64_t i) const {
    for_row_type<T>(p.dtype, [&](auto element) {
      using Out = decltype(element);
      for (int64_t h = 0; h < p.heads; ++h)
        store_row<Out, T>(to.dq.row<Out>(b, h, i), dq + h * round_up_to_lanes<T>(p.head_dim), p.head_dim,
                          T(1));
    });
    std::copy(dweights, dweights + p.heads, static_cast<T*>(to.dweights) + (b * p.seqlen_q + i) * p.heads);
  }
};

// The products above, after compute_scores(first, keys). Replaces S by G. `dk` has a row of d columns for each key.
template <class T>
void add_indexer_gradients(const IndexerParams& p, const IndexerTile<T>& t, int64_t first, int64_t keys,
                           const T* dscores, const QueryGradients<T>& to, T* dk) {
  for (int64_t r = 0; r < keys; ++r) {
    T* row = t.s + r * t.ld;
    const Vec<T> dscore = splat<T>(dscores[r]);
    for (int64_t c = 0; c < t.ld; c += kLanes<T>) {
      const Vec<T> s = load<T>(row + c);
      const Vec<T> positive = s < T(0) ? Vec<T>{} : s;
      store<T>(to.dweights + c, load<T>(to.dweights + c) + dscore * positive);
      const Vec<T> g = dscore * load<T>(t.weights + c) * static_cast<T>(p.scale);
      store<T>(row + c, s <= T(0) ? Vec<T>{} : g);
    }
  }
  gemm<T>(p.heads, t.d, {keys, t.s, 1, t.ld, t.k_tile + first * t.d, t.d, to.dq, t.d, true});
  const Tile<T> q = for_row_type<T>(p.dtype, [&](auto element) {
    using In = decltype(element);
    return load_tile<In, T>(p.q.row<In>(t.b, 0, t.i), p.q.stride_h, p.heads, p.head_dim, t.q_copy);
  });
  gemm<T>(keys, t.d, {p.heads, t.s, t.ld, 1, q.data, q.ld, dk, t.d, true});
}

// dk of each part, in the accumulator's type: [B][parts][S_k][d].
template <class T>
struct KeyGradientParts {
  T* data;
  int64_t parts, d;

  static KeyGradientParts allocate(Arena& arena, const IndexerParams& p) {
    const int64_t parts = indexer_parts(p), d = round_up_to_lanes<T>(p.head_dim);
    return {arena.take<T>(p.batch * parts * p.seqlen_k * d), parts, d};
  }
  T* row(const IndexerParams& p, int64_t b, int64_t part, int64_t j) const {
    return data + ((b * parts + part) * p.seqlen_k + j) * d;
  }

  // dk = the sum of the parts. A key that is hidden from all queries has gradient 0.
  void store_to(const IndexerParams& p, const IndexerGradients& to, const Parallel& parallel) const {
    for_each_task(parallel, p.batch * ceil_div(p.seqlen_k, kIndexerBlockK), [&](int64_t task, int) {
      const int64_t tiles = ceil_div(p.seqlen_k, kIndexerBlockK), b = task / tiles;
      const int64_t j0 = task % tiles * kIndexerBlockK, end = std::min(j0 + kIndexerBlockK, p.seqlen_k);
      for (int64_t j = j0; j < end; ++j) {
        T* sum = row(p, b, 0, j);
        if (!p.key_is_visible(b, j)) std::fill(sum, sum + d, T(0));
        for (int64_t part = 1; part < parts && p.key_is_visible(b, j); ++part)
          add_rows<T>(sum, row(p, b, part, j), d);
        for_row_type<T>(p.dtype, [&](auto element) {
          using Out = decltype(element);
          store_row<Out, T>(to.dk.row<Out>(b, 0, j), sum, p.head_dim, T(1));
        });
      }
    });
  }
};

// Runs body(b, i, part, thread) for all queries. One thread clears a part of dk, then runs the queries of this part in
// order.
template <class T, class Body>
void for_each_query_of_parts(const IndexerParams& p, const KeyGradientParts<T>& dk, int64_t block_q,
                             const Parallel& parallel, const Body& body) {
  for_each_task(parallel, p.batch * dk.parts, [&](int64_t task, int thread) {
    const int64_t b = task / dk.parts, part = task % dk.parts;
    std::fill(dk.row(p, b, part, 0), dk.row(p, b, part, 0) + p.seqlen_k * dk.d, T(0));
    for (int64_t i0 = part * block_q; i0 < p.seqlen_q; i0 += dk.parts * block_q)
      body(b, i0, std::min(block_q, p.seqlen_q - i0), part, thread);
  });
}
