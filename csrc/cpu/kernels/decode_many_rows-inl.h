// The two products of decode for many rows of Q: S^T = K Q^T and O += P V by the matrix product of the forward. A row
// of Q is a lane of S^T.
//
// The right operand of a product comes in panels, [columns / kPanel][depth][kPanel]. A panel stays in L1 while it is
// multiplied by all rows of the left operand. Q^T is packed once in a task. V is packed panel by panel, or read in
// place.
//
// decode_lanes-inl.h multiplies fewer rows, as blocks of lanes.
#pragma once

#include "decode_operands-inl.h"
#include "decode_several_vectors-inl.h"
#include "decode_sums_of_columns-inl.h"
#include "decode_vector_of_rows-inl.h"

template <class T>
constexpr int64_t kPanel = 2 * kLanes<T>;
constexpr int64_t kPanelBytes =
    18 << 10;  // a panel of this size stays in L1, together with rows of the left operand

// Returns how many rows of a panel stay in L1: a multiple of 16, for AMX.
template <class E>
constexpr int64_t rows_in_l1(int64_t width, int64_t depth) {
  const int64_t passes = ceil_div(depth * width * static_cast<int64_t>(sizeof(E)), kPanelBytes);
  return ceil_div(ceil_div(depth, passes), 16) * 16;
}

// C = A B for one panel of B, [depth][width].
template <class T, class E>
void gemm_of_panel(int64_t rows, int64_t width, GemmArgs<T, E> g) {
  const int64_t depth = g.depth, block = rows_in_l1<E>(width, depth);
  for (int64_t k = 0; k < depth; k += block) {
    g.depth = std::min(block, depth - k);
    gemm<T, E>(rows, width, g);
    g.a += g.depth * g.a_depth;
    g.b += g.depth * g.ldb;
    g.accumulate = true;
  }
}

// lanes = lanes_of(rows), with the rows of the current sequence.
template <class In, class T>
struct ManyRows {
  using Operands = ManyRowsOperands<In, T>;
  using E = typename Operands::Element;
  // The columns of Q and of copied keys in vectors of rows are a multiple of the widest span.
  using WidestForm = BlockForm<E, T, kHasThreeQuarters<In, T>>;
  static constexpr int kSpanOfVectors = FA_VECTOR_BYTES == 64 || kMayWidenKeys<In> ? WidestForm::kSpan : 1;
  static int64_t whole_columns(int64_t depth) { return ceil_div(depth, kSpanOfVectors) * kSpanOfVectors; }

  E* q;           // [heads of a task][D][lanes]   Q^T in panels
  T* scores;      // [block_k][lanes]              S^T, if other steps than the softmax follow
  T* prob_lanes;  // [block_k][lanes]              P^T, if P was not transposed
  E* k_tile;      // [block_k][D or D_v]           keys that cannot be read directly, then widened values
  E* v_panel;     // [block_k][kPanel]             the same for values; Pair: pairs across the keys
  E* probs;       // [lanes][block_k / 2]          Pair only
  T* rescale;     // [heads of a task][lanes]

  static ManyRows allocate(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads,
                           int64_t block_k) {
    ManyRows m{};
    rows = std::min<int64_t>(rows, kMostRowsAtOnce);  // for a shorter sequence
    if (!fills_lanes<T>(rows)) return m;
    const int64_t lanes = lanes_of<T>(rows), depth = Operands::depth_of(p.sizes.head_dim);
    m.q = arena.take<E>(heads * block_depth_of<T>(depth) * round_up_to_lanes<T>(lanes));
    // Transpositions read and write whole vectors.
    const int64_t whole = whole_chunks(block_k) * lanes + kLanes<T>;
    m.scores = arena.take<T>(whole);
    m.prob_lanes = arena.take<T>(whole);
    const int64_t wider = Operands::depth_of(std::max(p.sizes.head_dim, p.sizes.head_dim_v));
    m.k_tile = arena.take<E>(block_k * round_up_to_lanes<T>(wider));
    m.v_panel = arena.take<E>(block_k * kPanel<T>);
    m.probs = arena.take<E>(Operands::prob_elements(lanes, whole_chunks(block_k)));
    m.rescale = arena.take<T>(heads * round_up_to_lanes<T>(lanes));
    return m;
  }

  // Packs Q^T of the task's head `n` from rows of Q as elements, `rows` x ldq.
  void load_queries(const AttentionParams& p, int64_t n, const E* from, int64_t ldq, int64_t rows) const {
    if (!fills_lanes<T>(rows)) return;
    const int64_t lanes = lanes_of<T>(rows), depth = Operands::depth_of(p.sizes.head_dim);
    if (uses_lane_blocks<T>(rows)) return load_lane_queries(p, n, from, ldq, rows);
    for (int64_t c = 0; c < lanes; c += kPanel<T>)
      Operands::load_queries(from + c * ldq, ldq, std::min(kPanel<T>, rows - c), depth,
                             q + (n * lanes + c) * depth, std::min(kPanel<T>, lanes - c));
  }

  // to = scale * K Q^T for head `n`. The first key is key j of the tile.
  void load_scores(int64_t n, int64_t rows, const Rows<In>& k, int64_t j, int64_t keys, T scale,
                   const LaneTile<T>& to, Prefetcher& ahead) const {
    if (uses_lane_blocks<T>(rows)) return load_lane_scores(n, rows, k, j, keys, scale, to, ahead);
    const int64_t depth = Operands::depth_of(k.cols), lanes = lanes_of<T>(rows);
    T* out = to.at(0, rows, j);
    const int64_t passes = ceil_div(depth, rows_in_l1<E>(std::min(kPanel<T>, lanes), depth));
    GradualPrefetch gradual(ahead, keys * lines_of<In>(k.cols), passes * keys * lanes / kLanes<T>);
    const Tile<E> tile = Operands::load_keys(k, keys, k_tile, 1);
    for (int64_t c = 0; c < lanes; c += kPanel<T>) {
      const int64_t width = std::min(kPanel<T>, lanes - c);
      gemm_of_panel<T, E>(keys, width,
                          {depth, tile.data, tile.ld, 1, q + (n * lanes + c) * depth, width, out + c, lanes,
                           false, scale, nullptr, gradual.prefetch_hook()});
    }
  }

  // out = rescale * out + P V. `chunk(j)` returns rows of V from key j on. The sums are the same wherever the chunks
  // are in memory.
  template <class Chunk>
  void add_values(const AllProbs<T>& all, int64_t rows, const Chunk& chunk, bool in_one_place, int64_t keys,
                  T* out, int64_t ldo, Prefetcher& ahead) const {
    Rows<In> v[kTileChunks];
    v[0] = chunk(0);
    for (int64_t j = kChunkRows; j < keys; j += kChunkRows)
      v[j / kChunkRows] = in_one_place ? Rows<In>{v[0].row(j), v[0].stride, v[0].cols} : chunk(j);
    if (uses_lane_blocks<T>(rows)) return add_lane_values(all, rows, v, keys, out, ldo, ahead);
    const int64_t cols = v[0].cols, depth = Operands::depth_of(keys);
    const LeftOperand<E> left = Operands::load_probs(all, rows, keys, probs);
    GradualPrefetch gradual(ahead, keys * lines_of<In>(cols), rows * ceil_div(cols, kLanes<T>));
    for (int64_t c = 0; c < cols; c += kPanel<T>) {
      const int64_t width = std::min(kPanel<T>, round_up_to_lanes<T>(cols - c));
      Tile<E> panel{v_panel, width};
      if (Operands::kReadsValuesInPlace && in_one_place && c + width <= cols) {
        panel = {reinterpret_cast<const E*>(v[0].data + c), v[0].stride};
      } else {
        for (int64_t j = 0; j < keys; j += kChunkRows) {
          const Rows<In>& rows_of_chunk = v[j / kChunkRows];
          Operands::load_values({rows_of_chunk.data + c, rows_of_chunk.stride, cols - c}, j,
                                std::min(kChunkRows, keys - j), v_panel, width);
        }
      }
      gemm<T, E>(rows, width,
                 {depth, left.data, left.row, left.depth, panel.data, panel.ld, out + c, ldo, true, T(1),
                  all.rescale, gradual.prefetch_hook()});
    }
  }

  // O += the sums of a tile, after its last add_values(). Only several vectors of rows have such sums.
  static void finish_values(int64_t rows, const T* sums, int64_t cols, T* out, int64_t ldo) {
    if constexpr (kHasVectorsOfRows)
      add_transposed(sums, std::min(rows, lanes_added_together<In, T>(rows)), cols, out, ldo);
  }

  // Returns P^T of a block of lanes, [keys][lanes], with zeros in the padding of the last chunk. `at`: the element of
  // prob_lanes for a copy.
  const T* block_of(const AllProbs<T>& all, int64_t first, int64_t rows, int64_t keys, int64_t at = 0) const {
    const int64_t lanes = lanes_of<T>(rows), end = whole_chunks(keys);
    if (all.transposed) return LaneTile<const T>{all.data, all.tile_keys}.at(first, rows, all.first_key);
    T* copy = prob_lanes + at;
    // Each vector overwrites the padding of the vector before it.
    load_tile_transposed<T, T>(all.data + first * all.ld + all.first_key, all.ld, rows, keys, copy, lanes);
    std::fill(copy + keys * lanes, copy + end * lanes, T(0));
    return copy;
  }

  // Returns the pairs of P^T of a block of lanes, [keys / 2][lanes].
  static const E* pairs_of(const AllProbs<T>& all, int64_t first, int64_t rows) {
    const LaneTile<const T> tile{all.data, all.tile_keys};
    return reinterpret_cast<const E*>(tile.at(first, rows, 0)) + all.first_key / 2 * lanes_of<T>(rows);
  }

  // The three functions above for blocks of lanes. `v`: the tile's chunks.
#if defined(FA_FEW_ROWS)
  void load_lane_queries(const AttentionParams& p, int64_t n, const E* from, int64_t ldq,
                         int64_t rows) const {
    FA_FEW_ROWS->load_queries(this, p, n, from, ldq, rows);
  }
  void load_lane_scores(int64_t n, int64_t rows, const Rows<In>& k, int64_t j, int64_t keys, T scale,
                        const LaneTile<T>& to, Prefetcher& ahead) const {
    FA_FEW_ROWS->load_scores(this, n, rows, &k, j, keys, scale, &to, &ahead);
  }
  void add_lane_values(const AllProbs<T>& all, int64_t rows, const Rows<In>* v, int64_t keys, T* out,
                       int64_t ldo, Prefetcher& ahead) const {
    FA_FEW_ROWS->add_values(this, &all, rows, v, keys, out, ldo, &ahead);
  }
#else
  void load_lane_queries(const AttentionParams& p, int64_t n, const E* from, int64_t ldq,
                         int64_t rows) const {
    const int64_t lanes = lanes_of<T>(rows), depth = Operands::depth_of(p.sizes.head_dim);
    for_each_lane_block<In, T>(rows, [&](int64_t first, int64_t count) {
      E* to = q + (n * lanes + first) * block_depth_of<T>(depth);
      if (first < lanes_scored_together<In, T>(rows))
        return load_query_lanes<T>(from + first * ldq, ldq, count, depth, to);
      if (multiplies_vector_of_rows<In, T>(count, rows))
        return load_block_of_queries<E, T>(from + first * ldq, ldq, count, whole_columns(depth), to);
      if constexpr (kReadsKeysInPlace<In, T>)
        if (reads_keys_in_place<In, T>(count) && !joins_vector_of_rows<In, T>(count, rows))
          return load_block(from + first * ldq, ldq, count, depth, to);
      load_query_lanes<T>(from + first * ldq, ldq, count, depth, to);
    });
  }
  void load_lane_scores(int64_t n, int64_t rows, const Rows<In>& k, int64_t j, int64_t keys, T scale,
                        const LaneTile<T>& to, Prefetcher& ahead) const {
    const int64_t depth = Operands::depth_of(k.cols), block_depth = block_depth_of<T>(depth);
    const E* own = q + n * block_depth * lanes_of<T>(rows);
    // The block from row `first` on, if it is multiplied together with the block before it.
    const auto joined_to = [&](int64_t first) {
      const int64_t rest = rows - first;
      if (!joins_vector_of_rows<In, T>(rest, rows)) return JoinedBlock<E, T>{};
      return JoinedBlock<E, T>{own + first * block_depth, to.at(first, rest, j)};
    };
    const int64_t several = lanes_scored_together<In, T>(rows);
    if constexpr (kHasVectorsOfRows && std::is_same_v<In, T>)
      score_several_vectors<In>(own, block_depth, rows, k, keys, scale, to, j, ahead);
    if constexpr (kReadsKeysInPlace<In, T>) {
      for_each_lane_block<In, T>(rows, [&](int64_t first, int64_t count) {
        if (first >= several && reads_keys_in_place<In, T>(count) &&
            !multiplies_vector_of_rows<In, T>(count, rows) && !joins_vector_of_rows<In, T>(count, rows))
          score_block(own + first * block_depth, count, k, keys, scale, to.at(first, count, j),
                      joined_to(first + count), ahead);
      });
      if (reads_all_keys_in_place<In, T>(rows)) return;
    }
    const Tile<E> tile =
        Operands::load_keys(k, keys, k_tile, std::max(widest_span<In, T>(rows), kSpanOfVectors));
    if constexpr (kHasVectorsOfRows && !std::is_same_v<In, T>)
      score_several_vectors<In>(own, block_depth, rows, Rows<T>{tile.data, tile.ld, depth}, keys, scale, to,
                                j, ahead);
    if constexpr (FA_VECTOR_BYTES == 64 || kMayWidenKeys<In>) {
      const int64_t whole_cols = tile.data == k_tile ? whole_columns(depth) : depth;
      for_each_lane_block<In, T>(rows, [&](int64_t first, int64_t count) {
        if (first >= several && multiplies_vector_of_rows<In, T>(count, rows))
          score_block_of_rows<E>(own + first * block_depth, count, Rows<E>{tile.data, tile.ld, whole_cols},
                                 keys, scale, to.at(first, count, j), k_tile, joined_to(first + count),
                                 ahead);
      });
    }
    score_lanes<In, T>(own, block_depth, rows, depth, tile, keys, scale, to, j, k_tile, ahead);
  }
  void add_lane_values(const AllProbs<T>& all, int64_t rows, const Rows<In>* v, int64_t keys, T* out,
                       int64_t ldo, Prefetcher& ahead) const {
    const int64_t several = lanes_added_together<In, T>(rows);
    if constexpr (kHasVectorsOfRows)
      if (several > 0) add_several_vectors(all, rows, v, keys, ldo, ahead);
    for_each_lane_block<In, T>(rows, [&](int64_t first, int64_t count) {
      if (first < several || joins_values<T>(count, rows)) return;  // the second: with the block before it
      if constexpr (Operands::kPairsProbs)
        if (all.has_pairs)
          return Operands::add_pairs(pairs_of(all, first, count), count, v, keys, out + first * ldo, ldo,
                                     ahead);
      LaneProbs<T> own{block_of(all, first, count, keys), lanes_of<T>(count)};
      const int64_t next = first + count, joined = rows_joined_to(next, rows);
      // AVX2: groups that take equally long prefetch at an even rate. In memory 7 and 8 rows take 0.81 to 0.93 of the time, 9 and 10
      // rows 0.95 (Zen 3). 16 and more rows have 1.0 to 1.08, and 16-bit values 0.98 to 1.08.
      own.evenly = std::is_same_v<In, T> && rows <= kLanes<T> * 3 / 2;
      if (joined > 0)
        own.joined = block_of(all, next, joined, keys, whole_chunks(keys) * own.lanes + kLanes<T>);
      Operands::add_lanes(own, count + joined, v, keys, out + first * ldo, ldo, probs, ahead);
    });
  }
#endif

 private:
  // all.sums += O^T of several vectors of rows.
  void add_several_vectors(const AllProbs<T>& all, int64_t rows, const Rows<In>* v, int64_t keys, int64_t ldo,
                           Prefetcher& ahead) const {
    Rows<T> values[kTileChunks];
    for (int64_t j = 0; j < keys; j += kChunkRows) {
      const Rows<In>& chunk = v[j / kChunkRows];
      Rows<T>& to = values[j / kChunkRows];
      if constexpr (std::is_same_v<In, T>) {
        to = chunk;
      } else {
        T* copy = k_tile + j * round_up_to_lanes<T>(chunk.cols);
        const Tile<T> wide = Operands::load_keys(chunk, std::min(kChunkRows, keys - j), copy, 1);
        to = {wide.data, wide.ld, chunk.cols};
      }
    }
    const int64_t distance = (all.transposed ? all.tile_keys : whole_chunks(keys)) * kLanes<T>;
    for_several_vectors<T>(lanes_added_together<In, T>(rows), [&](int64_t first, auto vectors) {
      const auto probs_of = [&](int n) {
        const int64_t row = first + n * kLanes<T>;
        return block_of(all, row, std::min<int64_t>(rows - row, kLanes<T>), keys, n * distance);
      };
      const RowVectors<T> probs{probs_of(0), distance};
      for (int n = 1; n < vectors.value; ++n) probs_of(n);  // the next copies, if P was not transposed
      add_columns_of_values<In, vectors.value>(probs, values, keys, all.first_key == 0,
                                               all.sums + first * ldo, ldo * kLanes<T>, ahead);
    });
  }
  // Returns the number of rows from row `first` on, if they are a block that shares a group of rows with the block before it.
  static int64_t rows_joined_to(int64_t first, int64_t rows) {
    return joins_values<T>(rows - first, rows) ? rows - first : 0;
  }
  // Q and S^T of a block that reads keys in place.
  static void load_block(const E* from, int64_t ldq, int64_t rows, int64_t depth, E* to) {
    if (columns_are_lanes<In, T>(rows)) return load_columns_of_queries<In>(from, ldq, rows, depth, to);
    if constexpr (kHasFormInPlace<In>) load_block_of_queries<In, T>(from, ldq, rows, depth, to);
  }
  void score_block(const E* own, int64_t rows, const Rows<In>& k, int64_t keys, T scale, T* out,
                   const JoinedBlock<E, T>& joined, Prefetcher& ahead) const {
    In* copy = reinterpret_cast<In*>(k_tile);
    if (columns_are_lanes<In, T>(rows))
      return score_sums_of_columns<In>(own, rows, k, keys, scale, out, copy, ahead);
    if constexpr (kHasFormInPlace<In>)
      score_block_of_rows<In>(own, rows, k, keys, scale, out, copy, joined, ahead);
  }
};
