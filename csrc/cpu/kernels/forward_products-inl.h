// The two products of the forward on one tile: S^T = K Q^T and O += P V. The first form has operands of the
// accumulator's type; 16-bit rows are widened when their tile is loaded. So float32, bfloat16 and float16 share one text.
#pragma once

#include "cache_rows-inl.h"
#include "masked_gemm-inl.h"
#include "softmax-inl.h"
#include "tile_gemm-inl.h"

// The tiles of K and V that the last products read. The next block of queries reads them again.
template <class E>
struct LoadedTiles {
  Tile<E> k{}, v{};
  Range k_keys{}, v_keys{};  // empty: not loaded

  // Returns the rows of a tile's keys. load() loads rows that `keys` does not contain.
  template <class Load>
  static Tile<E> rows_of(const TileFrame& f, Tile<E>& tile, Range& keys, const Load& load) {
    if (f.j0 < keys.begin || f.j0 + f.keys > keys.end) {
      tile = load();
      keys = {f.j0, f.j0 + f.keys};
    }
    return {tile.data + (f.j0 - keys.begin) * tile.ld, tile.ld};
  }
};

// O = O * factor + P V, without the keys that a query does not see. `g`: the product of all queries and keys of the tile.
template <class T, class E>
void multiply_runs(const KeyStairs& stairs, int64_t queries, int64_t cols, const GemmArgs<T, E>& g) {
  constexpr int64_t kKeys = std::is_same_v<E, T> ? 1 : 2;  // of an element along the depth
  stairs.for_each_run(queries, [&](int64_t query, int64_t end, int64_t keys) {
    GemmArgs<T, E> own = g;
    own.depth = ceil_div(keys, kKeys);
    own.a += query * g.a_row;
    own.c += query * g.ldc;
    if (g.factor) own.factor += query;
    gemm<T, E>(end - query, cols, own);
  });
}

template <class In, class T>
struct ForwardProducts {
  using Loaded = LoadedTiles<T>;

  T* q_transposed;  // [blocks][D][block_q]   Q^T
  T* k_tile;        // [block_k][D]      only if the caller's k cannot be read directly
  T* v_tile;        // [block_k][D_v]    likewise
  T* finite_tile;   // [block_k][D_v]    for masked_gemm
  T* key_copy;      // [block_k][D]      only if keys come from pages or 8 bits; rows of type `dtype`
  T* value_copy;    // [block_k][D_v]    likewise
  DType dtype;      // of the rows

  // `blocks`: blocks of queries that share the tiles of keys and values.
  static ForwardProducts allocate(Arena& arena, const AttentionParams& p, int64_t blocks = 1) {
    const auto [block_q, block_k] = fitted_forward_tiling<T>(p.sizes);
    const int64_t d = round_up_to_lanes<T>(p.sizes.head_dim), d_v = round_up_to_lanes<T>(p.sizes.head_dim_v);
    ForwardProducts r;
    r.q_transposed = arena.take<T>(blocks * p.sizes.head_dim * block_q);
    r.k_tile = arena.take<T>(block_k * d);
    r.v_tile = arena.take<T>(block_k * d_v);
    r.finite_tile = arena.take<T>(block_k * d_v);
    r.key_copy = copies_rows(p) ? arena.take<T>(block_k * d) : nullptr;
    r.value_copy = copies_rows(p) ? arena.take<T>(block_k * d_v) : nullptr;
    r.dtype = p.dtype;
    return r;
  }

  // The same scratch with the queries of block `n`.
  ForwardProducts of_block(const AttentionParams& p, int64_t n) const {
    ForwardProducts r = *this;
    r.q_transposed += n * p.sizes.head_dim * fitted_forward_tiling<T>(p.sizes).block_q;
    return r;
  }

  void load_queries(const AttentionParams& p, int64_t b, int64_t h, int64_t i0, int64_t queries,
                    int64_t ld) const {
    load_tile_transposed_of<In, T>(p.q, dtype, b, h, i0, queries, p.sizes.head_dim, q_transposed, ld);
  }

  // Computes S^T. Leaves out the part that `stairs` leaves out. `loaded` (or null): keys that it has are not loaded again.
  void scores(const AttentionParams& p, const TileFrame& f, const KeyStairs& stairs, T scale, T* out,
              bool accumulate = false, PrefetchHook prefetch_hook = {}, Loaded* loaded = nullptr) const {
    const int64_t d = p.sizes.head_dim;
    const auto multiply = [&](int64_t n, int64_t count, const Tile<T>& k) {
      stairs.for_each_step(n, n + count, [&](int64_t j, int64_t end, int64_t lane) {
        gemm<T>(end - j, f.ld - lane,
                {d, k.data + (j - n) * k.ld, k.ld, 1, q_transposed + lane, f.ld, out + j * f.ld + lane, f.ld,
                 accumulate, scale, nullptr, prefetch_hook});
      });
    };
    if (!converts_rows<In, T>(dtype) && reads_pages(p, f.j0))
      return for_each_page<T>(
          p, p.k, p.sizes.kv_head(f.h), f.j0, f.keys, d,
          [&](int64_t n, int64_t count, const Rows<T>& k) { multiply(n, count, {k.data, k.stride}); });
    const auto load = [&] { return load_rows(p, p.k, p.varlen.cache.k_scale, f, d, key_copy, k_tile); };
    multiply(0, f.keys, loaded ? Loaded::rows_of(f, loaded->k, loaded->k_keys, load) : load());
  }

  // Whether softmax() may write P in the form of the product's operand. Here it may not: P replaces S.
  static constexpr bool packs_probs(const AttentionParams&) { return false; }

  void softmax(const TileFrame& f, const KeyStairs& stairs, T unit, T* scores, T* row_max, T* row_sum,
               T* rescale, bool) const {
    for_row_size<In>(dtype, [&](auto element) {
      online_softmax<T, decltype(element)>(f, stairs, unit, scores, row_max, row_sum, rescale);
    });
  }

  // out = out * rescale + P V. rescale: one factor per query; null: 1.
  void add_values(const AttentionParams& p, const ScoreTile<T>& score, const KeyStairs& stairs,
                  const T* probs, const T* rescale, T* out, bool = false, Loaded* loaded = nullptr,
                  PrefetchHook prefetch_hook = {}) const {
    const TileFrame& f = score.frame;
    const int64_t d_v = p.sizes.head_dim_v;
    const auto load = [&] { return load_rows(p, p.v, p.varlen.cache.v_scale, f, d_v, value_copy, v_tile); };
    const Tile<T> v = loaded ? Loaded::rows_of(f, loaded->v, loaded->v_keys, load) : load();
    masked_gemm<T>(score, true, f.queries, d_v,
                   {f.keys, probs, 1, f.ld, v.data, v.ld, out, round_up_to_lanes<T>(d_v), true, T(1), rescale,
                    prefetch_hook},
                   finite_tile,
                   [&](const GemmArgs<T>& g) { multiply_runs<T, T>(stairs, f.queries, d_v, g); });
  }

 private:
  // Loads the tile of k or v. 8-bit rows are converted directly to T, because 16 bits would round row * factor.
  Tile<T> load_rows(const AttentionParams& p, const Tensor4& t, const CacheScale& scale, const TileFrame& f,
                    int64_t cols, T* row_copy, T* tile) const {
    const int64_t h_kv = p.sizes.kv_head(f.h);
    if (p.varlen.cache.dtype != CacheDType::kOfQuery) {
      const int64_t ld = round_up_to_lanes<T>(cols);
      rows_of_tile<T>(p, t, scale, f.b, h_kv, f.j0, f.keys, cols, tile, ld);
      for (int64_t r = 0; r < f.keys; ++r) std::fill(tile + r * ld + cols, tile + (r + 1) * ld, T(0));
      return {tile, ld};
    }
    return for_row_type<In>(dtype, [&](auto element) {
      using Row = decltype(element);
      if (!std::is_same_v<Row, T> && reads_pages(p, f.j0)) {
        const int64_t ld = round_up_to_lanes<T>(cols);
        for_each_page<Row>(p, t, h_kv, f.j0, f.keys, cols,
                           [&](int64_t n, int64_t count, const Rows<Row>& rows) {
                             load_tile<Row, T>(rows.data, rows.stride, count, cols, tile + n * ld);
                           });
        return Tile<T>{tile, ld};
      }
      Row* const copy = reinterpret_cast<Row*>(row_copy);
      const Rows<Row> rows = rows_of_tile<Row>(p, t, scale, f.b, h_kv, f.j0, f.keys, cols, copy, cols);
      return load_tile<Row, T>(rows.data, rows.stride, f.keys, cols, tile);
    });
  }
};

#if defined(FA_DOT_BFLOAT16)

// The form for bfloat16 operands without widening. P is rounded to bfloat16, as in torch; its sum l is not rounded.
template <>
struct ForwardProducts<BFloat16, float> {
  struct Loaded : LoadedTiles<Pair> {
    Rows<BFloat16> v_rows{};  // of v_keys; null: in several pages
  };

  Pair* q_transposed;    // [blocks][D / 2][block_q]
  Pair* k_tile;          // [block_k][D / 2]    only if the caller's k does not come in pairs
  Pair* v_pairs;         // [block_k / 2][D_v]
  Pair* prob_pairs;      // [block_q][block_k / 2]   P, transposed if a left operand may be transposed
  BFloat16* key_copy;    // [block_k][D]        only if keys come from pages or 8 bits
  BFloat16* value_copy;  // [block_k][D_v]      likewise
  float* factors;        // [block_k]                of 8-bit rows
  float* scaled_probs;   // [block_k][block_q]      P with the factors of the values

  static ForwardProducts allocate(Arena& arena, const AttentionParams& p, int64_t blocks = 1) {
    const auto [block_q, block_k] = fitted_forward_tiling<float>(p.sizes);
    ForwardProducts r;
    r.q_transposed = arena.take<Pair>(blocks * pairs_of(p.sizes.head_dim) * block_q);
    r.k_tile = arena.take<Pair>(block_k * round_up_to_lanes<float>(pairs_of(p.sizes.head_dim)));
    r.v_pairs = arena.take<Pair>(pairs_of(block_k) * round_up_to_lanes<float>(p.sizes.head_dim_v));
    r.prob_pairs = arena.take<Pair>(LeftPairs::count(block_q, block_k));
    r.key_copy = copies_rows(p) ? arena.take<BFloat16>(block_k * p.sizes.head_dim) : nullptr;
    r.value_copy = copies_rows(p) ? arena.take<BFloat16>(block_k * p.sizes.head_dim_v) : nullptr;
    const bool has_factors = p.varlen.cache.dtype != CacheDType::kOfQuery;
    r.factors = has_factors ? arena.take<float>(block_k) : nullptr;
    r.scaled_probs = has_factors ? arena.take<float>(block_k * block_q) : nullptr;
    return r;
  }

  ForwardProducts of_block(const AttentionParams& p, int64_t n) const {
    ForwardProducts r = *this;
    r.q_transposed += n * pairs_of(p.sizes.head_dim) * fitted_forward_tiling<float>(p.sizes).block_q;
    return r;
  }

  void load_queries(const AttentionParams& p, int64_t b, int64_t h, int64_t i0, int64_t queries,
                    int64_t ld) const {
    load_pairs_transposed(p.q.row<BFloat16>(b, h, i0), p.q.stride_s, queries, p.sizes.head_dim, q_transposed,
                          ld);
  }

  void scores(const AttentionParams& p, const TileFrame& f, const KeyStairs& stairs, float scale, float* out,
              bool accumulate = false, PrefetchHook prefetch_hook = {}, Loaded* loaded = nullptr) const {
    const int64_t d = p.sizes.head_dim;
    const int64_t h_kv = p.sizes.kv_head(f.h);
    const CacheScale& scale_of_keys = p.varlen.cache.k_scale;
    const bool multiplied = load_factors<float>(p, scale_of_keys, h_kv, f.j0, f.keys, f.keys, factors);
    const auto multiply = [&](int64_t n, int64_t count, const Tile<Pair>& k) {
      stairs.for_each_step(n, n + count, [&](int64_t j, int64_t end, int64_t lane) {
        gemm<float, Pair>(end - j, f.ld - lane,
                          {pairs_of(d), k.data + (j - n) * k.ld, k.ld, 1, q_transposed + lane, f.ld,
                           out + j * f.ld + lane, f.ld, accumulate, scale, nullptr, prefetch_hook});
      });
    };
    if (reads_pages(p, f.j0))
      return for_each_page<BFloat16>(p, p.k, h_kv, f.j0, f.keys, d,
                                     [&](int64_t n, int64_t count, const Rows<BFloat16>& k) {
                                       multiply(n, count, load_pair_rows(k.data, k.stride, count, d, k_tile));
                                     });
    const auto load = [&] {
      const Rows<BFloat16> rows = rows_of_tile<BFloat16>(p, p.k, multiplied ? CacheScale{} : scale_of_keys,
                                                         f.b, h_kv, f.j0, f.keys, d, key_copy, d);
      return load_pair_rows(rows.data, rows.stride, f.keys, d, k_tile);
    };
    multiply(0, f.keys, loaded ? Loaded::rows_of(f, loaded->k, loaded->k_keys, load) : load());
    if (multiplied) multiply_rows_by_factors(out, f, out);
  }

  // Whether the softmax writes P in 16 bits. This needs that nothing multiplies P before the product.
  static bool packs_probs(const AttentionParams& p) {
    return !p.dropout && p.varlen.cache.dtype == CacheDType::kOfQuery;
  }

  // Writes P to prob_pairs if `packed`, otherwise in place of S.
  void softmax(const TileFrame& f, const KeyStairs& stairs, float unit, float* scores, float* row_max,
               float* row_sum, float* rescale, bool packed) const {
    if (packed) return softmax_to_pairs(f, stairs, unit, scores, prob_pairs, row_max, row_sum, rescale);
    online_softmax<float, BFloat16>(f, stairs, unit, scores, row_max, row_sum, rescale);
  }

  // `packed`: P is in prob_pairs, and `probs` is free memory for it.
  void add_values(const AttentionParams& p, const ScoreTile<float>& score, const KeyStairs& stairs,
                  float* probs, const float* rescale, float* out, bool packed = false,
                  Loaded* loaded = nullptr, PrefetchHook prefetch_hook = {}) const {
    const TileFrame& f = score.frame;
    const int64_t d_v = p.sizes.head_dim_v, ld = round_up_to_lanes<float>(d_v);
    const int64_t h_kv = p.sizes.kv_head(f.h);
    const CacheScale& scale = p.varlen.cache.v_scale;
    const bool multiplied = load_factors<float>(p, scale, h_kv, f.j0, f.keys, f.keys, factors);
    if (multiplied) {
      multiply_rows_by_factors(probs, f, scaled_probs);
      probs = scaled_probs;
    }
    const Range keys{f.j0, f.j0 + f.keys};
    const bool is_loaded = loaded && loaded->v_keys.begin == keys.begin && loaded->v_keys.end == keys.end &&
                           (loaded->v_rows.data || !score.partial);
    const Rows<BFloat16> v =
        is_loaded ? loaded->v_rows : load_values(p, f, multiplied ? CacheScale{} : scale, score.partial);
    if (loaded) loaded->v_rows = v;
    const bool cleared = score.partial && clear_rows_not_finite(v, f.keys, v_pairs, ld);
    if (loaded)
      loaded->v_keys = cleared ? Range{} : keys;  // a block without masked keys needs the cleared rows
    const LeftPairs left =
        packed ? probs_operand(prob_pairs, f.keys, f.ld) : transposed_pairs(probs, f.keys, f.ld, prob_pairs);
    multiply_runs<float, Pair>(stairs, f.queries, d_v,
                               {pairs_of(f.keys), left.data, left.row, left.depth, v_pairs, ld, out, ld, true,
                                1.0f, rescale, prefetch_hook});
    if (cleared && packed) widen_probs(left, f.keys, f.ld, probs);
    if (cleared)
      add_rows_not_finite<BFloat16, float>(score, true, f.queries, probs, 1, f.ld, v, f.keys, out, ld);
  }

 private:
  // Loads v_pairs. Returns the rows, null if they are in several pages. `in_one_place`: the caller reads the rows, too.
  Rows<BFloat16> load_values(const AttentionParams& p, const TileFrame& f, const CacheScale& scale,
                             bool in_one_place) const {
    const int64_t h_kv = p.sizes.kv_head(f.h), d_v = p.sizes.head_dim_v, ld = round_up_to_lanes<float>(d_v);
    const auto load = [&](int64_t n, int64_t count, const Rows<BFloat16>& rows) {
      load_pairs_across(rows.data, rows.stride, count, d_v, v_pairs + n / 2 * ld, ld);
    };
    if (reads_pages(p, f.j0) && !in_one_place) {
      for_each_page<BFloat16>(p, p.v, h_kv, f.j0, f.keys, d_v, load);
      return {};
    }
    const Rows<BFloat16> rows =
        rows_of_tile<BFloat16>(p, p.v, scale, f.b, h_kv, f.j0, f.keys, d_v, value_copy, d_v);
    load(0, f.keys, rows);
    return rows;
  }

  // to[key][query] = from[key][query] * factors[key]. The product of an 8-bit key and its factor does not fit into
  // bfloat16. The product of a float32 score and the factor is not rounded to bfloat16.
  void multiply_rows_by_factors(const float* from, const TileFrame& f, float* to) const {
    for (int64_t r = 0; r < f.keys; ++r)
      for (int64_t c = r * f.ld; c < (r + 1) * f.ld; c += kLanes<float>)
        store<float>(to + c, load<float>(from + c) * factors[r]);
  }
};

#endif
