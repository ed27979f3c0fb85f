// The products of attention by index that have heads as lanes: S^T = K Q^T and dP^T = V dO^T.
//
// The heads that share a key head may fill a small part of a vector. Then the products are the products of decode for a
// few rows (decode_lanes-inl.h): a vector holds several columns of each head. Otherwise they are the products of the
// forward.
#pragma once

#include "decode_many_rows-inl.h"
#include "forward_products-inl.h"

// Returns whether the products of decode are used.
template <class T>
constexpr bool are_few_heads(int64_t heads) {
  return heads <= kLanes<T> / 2;
}

// Returns the number of rows for decode's products: at least the smallest allowed number.
template <class T>
constexpr int64_t rows_of_few_heads(int64_t heads) {
  while (!fills_lanes<T>(heads)) ++heads;
  return heads;
}

template <class In, class T>
struct HeadScores {
  using Operands = ManyRowsOperands<In, T>;
  using E = typename Operands::Element;

  ForwardProducts<In, T> whole;
  ManyRows<In, T> few;
  E* rows;  // [heads][D] Q of few heads as elements, padded with zeros

  // `row`: the call of one query row, with the heads as queries and a tile of keys.
  static HeadScores allocate(Arena& arena, const AttentionParams& row) {
    const Sizes& z = row.sizes;
    HeadScores s{ForwardProducts<In, T>::allocate(arena, row), {}, nullptr};
    if (!are_few_heads<T>(z.seqlen_q)) return s;
    const int64_t heads = rows_of_few_heads<T>(z.seqlen_q);
    s.few = ManyRows<In, T>::allocate(arena, row, heads, 1, z.seqlen_k);
    s.rows = arena.take<E>(heads * elements_of_row(z.head_dim));
    return s;
  }

  // Loads the heads [h, h + heads).
  void load_queries(const AttentionParams& row, int64_t h, int64_t heads, int64_t ld) const {
    if (!rows) return whole.load_queries(row, 0, 0, h, heads, ld);
    const int64_t ldq = elements_of_row(row.sizes.head_dim), all = rows_of_few_heads<T>(heads);
    for (int64_t n = 0; n < heads; ++n)
      Operands::load_row(row.q.row<In>(0, 0, h + n), row.sizes.head_dim, rows + n * ldq);
    std::fill(rows + heads * ldq, rows + all * ldq, E{});
    few.load_queries(row, 0, rows, ldq, all);
  }

  // Writes S^T, [keys][f.ld]. Padding lanes are arbitrary. Prefetches all lines of `ahead`.
  template <class Ahead>
  void scores(const AttentionParams& row, const TileFrame& f, T scale, T* out, Ahead& ahead,
              int64_t lines) const {
    if (!rows) {
      GradualPrefetch gradual(ahead, lines, f.keys * f.ld / kLanes<T>);
      return whole.scores(row, f, KeyStairs(f), scale, out, false, gradual.prefetch_hook());
    }
    const int64_t lanes = lanes_of<T>(rows_of_few_heads<T>(f.queries));
    const int64_t lines_of_chunk = ceil_div(lines, ceil_div(f.keys, kChunkRows));
    for (int64_t j = 0; j < f.keys; j += kChunkRows) {
      ahead.lines(lines_of_chunk);
      scores_of_chunk(row, j, f.keys, scale, few.scores);
      for (int64_t n = 0; n < std::min(kChunkRows, f.keys - j); ++n)
        store<T>(out + (j + n) * f.ld, load<T>(few.scores + n * lanes));
    }
  }

  // Writes S^T of few heads and of the keys [j, j + kChunkRows) that exist: [kChunkRows][lanes of the heads].
  void scores_of_chunk(const AttentionParams& row, int64_t j, int64_t keys, T scale, T* out) const {
    Prefetcher nothing;
    const Rows<In> k{row.k.row<In>(0, 0, j), row.k.stride_s, row.sizes.head_dim};
    few.load_scores(0, rows_of_few_heads<T>(row.sizes.seqlen_q), k, 0, std::min(kChunkRows, keys - j), scale,
                    {out, kChunkRows}, nothing);
  }

 private:
  static int64_t elements_of_row(int64_t cols) { return round_up_to_lanes<T>(Operands::depth_of(cols)); }
};
