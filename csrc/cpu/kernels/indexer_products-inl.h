// Scores of the indexer for one query and a tile of keys. The heads are the columns of one product S = K_tile Q_i^T.
// score[j] = sum_h w[h] relu(S[j][h]) is a sum over the lanes. So decoding and long sequences run the same code, and a
// query's scores are contiguous for the selection.
#pragma once

#include "gemm-inl.h"
#include "tile_gemm-inl.h"
#include "tiles-inl.h"

constexpr int64_t kIndexerBlockQ = 8;   // queries that share the loads of a tile of keys
constexpr int64_t kIndexerBlockK = 64;  // a multiple of the lanes

// The keys that the queries see, before the key mask.
inline Range indexer_keys(const IndexerParams& p, int64_t b, int64_t i_begin, int64_t i_end) {
  return visible_keys(p.band_of(b), i_begin, i_end, p.keys_of(b));
}

// Returns the rows of keys [j0, j0 + keys): the caller's memory if their distance is constant, otherwise a copy.
template <class In>
inline Rows<In> indexer_key_rows(const IndexerParams& p, int64_t b, int64_t j0, int64_t keys, In* copy) {
  const bool one_page = !p.block_table || j0 / p.page_size == (j0 + keys - 1) / p.page_size;
  if (one_page) return {p.key_row<In>(b, j0), p.k.stride_s, p.head_dim};
  for (int64_t r = 0; r < keys; ++r) {
    const In* row = p.key_row<In>(b, j0 + r);
    std::copy(row, row + p.head_dim, copy + r * p.head_dim);
  }
  return {copy, p.head_dim, p.head_dim};
}

// The product S[j][h] = scale <k[j], q[i][h]>, for operands of the accumulator's type.
template <class In, class T>
struct IndexerProducts {
  int64_t ld;       // H_I, rounded up to whole vectors
  T* q_transposed;  // [kIndexerBlockQ][D_I][ld]
  T* k_tile;        // [kIndexerBlockK][D_I]
  In* row_copy;     // [kIndexerBlockK][D_I], for pages
  Tile<T> keys{};   // of the tile

  static IndexerProducts allocate(Arena& arena, const IndexerParams& p) {
    IndexerProducts r;
    r.ld = round_up_to_lanes<T>(p.heads);
    r.q_transposed = arena.take<T>(kIndexerBlockQ * p.head_dim * r.ld);
    r.k_tile = arena.take<T>(kIndexerBlockK * round_up_to_lanes<T>(p.head_dim));
    r.row_copy = p.block_table ? arena.take<In>(kIndexerBlockK * p.head_dim) : nullptr;
    return r;
  }

  void load_query(const IndexerParams& p, int64_t b, int64_t i, int64_t n) const {
    load_tile_transposed<In, T>(p.q.row<In>(b, 0, i), p.q.stride_h, p.heads, p.head_dim,
                                q_transposed + n * p.head_dim * ld, ld);
  }

  void load_keys(const IndexerParams& p, int64_t b, int64_t j0, int64_t count) {
    const Rows<In> rows = indexer_key_rows<In>(p, b, j0, count, row_copy);
    keys = load_tile<In, T>(rows.data, rows.stride, count, p.head_dim, k_tile);
  }

  // For query n of the block and `count` rows of the tile.
  void multiply(const IndexerParams& p, int64_t n, int64_t first, int64_t count, T* out) const {
    gemm<T>(count, ld,
            {p.head_dim, keys.data + first * keys.ld, keys.ld, 1, q_transposed + n * p.head_dim * ld, ld, out,
             ld, false, static_cast<T>(p.scale)});
  }
};

#if defined(FA_DOT_BFLOAT16)

// The same for bfloat16 operands without widening.
template <>
struct IndexerProducts<BFloat16, float> {
  int64_t ld, pairs;
  Pair* q_transposed;  // [kIndexerBlockQ][D_I / 2][ld]
  Pair* k_tile;        // [kIndexerBlockK][D_I / 2], only if the caller's rows are not whole pairs
  BFloat16* row_copy;
  Tile<Pair> keys{};

  static IndexerProducts allocate(Arena& arena, const IndexerParams& p) {
    IndexerProducts r;
    r.ld = round_up_to_lanes<float>(p.heads);
    r.pairs = pairs_of(p.head_dim);
    r.q_transposed = arena.take<Pair>(kIndexerBlockQ * r.pairs * r.ld);
    r.k_tile = arena.take<Pair>(kIndexerBlockK * round_up_to_lanes<float>(r.pairs));
    r.row_copy = p.block_table ? arena.take<BFloat16>(kIndexerBlockK * p.head_dim) : nullptr;
    return r;
  }

  void load_query(const IndexerParams& p, int64_t b, int64_t i, int64_t n) const {
    load_pairs_transposed(p.q.row<BFloat16>(b, 0, i), p.q.stride_h, p.heads, p.head_dim,
                          q_transposed + n * pairs * ld, ld);
  }

  void load_keys(const IndexerParams& p, int64_t b, int64_t j0, int64_t count) {
    const Rows<BFloat16> rows = indexer_key_rows<BFloat16>(p, b, j0, count, row_copy);
    keys = load_pair_rows(rows.data, rows.stride, count, p.head_dim, k_tile);
  }

  void multiply(const IndexerParams& p, int64_t n, int64_t first, int64_t count, float* out) const {
    gemm<float, Pair>(count, ld,
                      {pairs, keys.data + first * keys.ld, keys.ld, 1, q_transposed + n * pairs * ld, ld, out,
                       ld, false, static_cast<float>(p.scale)});
  }
};

#endif

// Returns the lanes of vector c that are heads, not padding. 0 * Inf of a padding lane must not reach a score.
template <class T>
FA_INLINE Vec<T> without_padding(Vec<T> x, int64_t c, int64_t heads) {
  using Lane = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
  const VecIndex<T> is_head = iota<T>() < static_cast<Lane>(heads - c);
  return is_head ? x : Vec<T>{};
}

// Copies a row of (B, S_q, H_I) weights, padded with zeros.
template <class T>
inline void load_indexer_weights(const IndexerParams& p, int64_t b, int64_t i, T* dst, int64_t ld) {
  const T* row = static_cast<const T*>(p.weights) + (b * p.seqlen_q + i) * p.heads;
  std::copy(row, row + p.heads, dst);
  std::fill(dst + p.heads, dst + ld, T(0));
}

// scores[j] = sum_h w[h] relu(S[j][h]) for `keys` rows of S. Writes whole vectors. relu(NaN) is NaN.
template <class T>
inline void weigh_heads(const T* products, int64_t keys, int64_t heads, int64_t ld, const T* weights,
                        T* scores) {
  constexpr int L = kLanes<T>;
  for (int64_t j0 = 0; j0 < keys; j0 += L) {
    Vec<T> sums[L];
    for (int r = 0; r < L; ++r) {
      const T* row = products + std::min<int64_t>(j0 + r, keys - 1) * ld;
      Vec<T> sum = {};
      for (int64_t c = 0; c < ld; c += L) {
        const Vec<T> s = load<T>(row + c);
        const Vec<T> term = load<T>(weights + c) * (s < T(0) ? Vec<T>{} : s);
        sum += c + L > heads ? without_padding<T>(term, c, heads) : term;
      }
      sums[r] = sum;
    }
    store<T>(scores + j0, sum_each<T>(sums));
  }
}
