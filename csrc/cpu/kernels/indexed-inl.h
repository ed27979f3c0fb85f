// Forward of attention by index. A task is some query rows of one key head. The loop over the tiles of a row's keys is
// the loop of forward-inl.h, with the heads as queries.
#pragma once

#include "decode_products-inl.h"
#include "indexed_few_heads-inl.h"
#include "softmax-inl.h"

template <class In, class T>
struct IndexedScratch {
  KeyTile<In, T> tile;
  In* q;                           // [heads][D]   if Q is widened
  HeadScores<In, T>* products;     // of each block of heads
  T* scores;                       // [keys][block of heads]   S^T, then P^T in place
  T* out;                          // [heads][D_v]    O, not yet divided by l
  T *row_max, *row_sum, *rescale;  // [heads]
};

template <class In, class T>
HeadScores<In, T>* allocate_products(Arena& arena, const AttentionParams& row) {
  const int64_t blocks = count_head_blocks({1, row.sizes.seqlen_q, 1});
  auto* products = arena.take<HeadScores<In, T>>(blocks);
  for (int64_t n = 0; n < blocks; ++n) {
    const auto own = HeadScores<In, T>::allocate(arena, row);
    if (products) products[n] = own;
  }
  return products;
}

template <class In, class T>
IndexedScratch<In, T> allocate_indexed(Arena& arena, const AttentionParams& p) {
  AttentionParams row;
  row.sizes = sizes_of_gathered(p.sizes);
  const int64_t heads = round_up_to_lanes<T>(row.sizes.seqlen_q) + block_of_heads();
  IndexedScratch<In, T> s;
  s.tile = KeyTile<In, T>::allocate(arena, p);
  s.q = arena.take<In>(heads * round_up_to_lanes<T>(p.sizes.head_dim));
  s.products = allocate_products<In, T>(arena, row);
  s.scores = arena.take<T>(kGatheredKeys * block_of_heads());
  s.out = arena.take<T>(heads * decode_columns<T>(p.sizes.head_dim_v));
  s.row_max = arena.take<T>(heads);
  s.row_sum = arena.take<T>(heads);
  s.rescale = arena.take<T>(heads);
  return s;
}

// The frame of one block of heads on one tile. Lanes are heads.
template <class T>
TileFrame frame_of_heads(const AttentionParams& row, int64_t block, int64_t keys) {
  const int64_t h0 = block * block_of_heads(), heads = std::min(block_of_heads(), row.sizes.seqlen_q - h0);
  return {0, 0, h0, 0, heads, keys, round_up_to_lanes<T>(heads), true};
}

template <class In, class T>
void forward_indexed_row(const IndexedParams& p, const KeyLists& lists, IndexedScratch<In, T>& s, int64_t b,
                         int64_t h_kv, int64_t i) {
  AttentionParams row = call_of_row<In>(p);
  const int64_t heads = row.sizes.seqlen_q, first_head = h_kv * heads, blocks = count_head_blocks(p.sizes);
  row.q = rows_of_heads<In>(p.q, p.dtype, b, first_head, i, heads, p.sizes.head_dim, s.q);
  const bool in_lanes = stays_in_lanes<T>(p);
  const int64_t d_v =
      in_lanes ? decode_columns<T>(p.sizes.head_dim_v) : round_up_to_lanes<T>(p.sizes.head_dim_v);
  const T unit = in_lanes ? T(1) : score_unit<T>(p), scale = unit == T(1) ? product_scale<T>(p) : T(1);

  for (int64_t n = 0; n < blocks; ++n) {
    const TileFrame f = frame_of_heads<T>(row, n, 0);
    s.products[n].load_queries(row, f.i0, f.queries, f.ld);
    for (int64_t c = 0; c < f.ld; ++c) {
      const RowStart<T> start =
          start_of_row<T>(p.sink, b, first_head + f.i0 + std::min(c, f.queries - 1), unit);
      s.row_max[f.i0 + c] = start.max;
      s.row_sum[f.i0 + c] = start.sum;
    }
  }
  std::fill(s.out, s.out + heads * d_v, T(0));

  const auto keys_of = [&](int64_t row) {
    return lists.cursor(b, h_kv, row, visible_keys(p.band, row, row + 1, p.sizes.seqlen_k));
  };
  KeyCursor cursor = keys_of(i);
  const KeyCursor following = keys_of(std::min(i + 1, p.sizes.seqlen_q - 1));
  while (s.tile.load(p, b, h_kv, cursor, following)) {
    row.k = s.tile.k;
    row.v = s.tile.v;
    if (in_lanes) {
      add_tile_of_few_heads(row, s.products[0], s.tile.count, s.scores, s.rescale,
                            HeadResults<T>{s.out, s.row_max, s.row_sum, d_v});
      continue;
    }
    RowsAhead keys_ahead = s.tile.keys_ahead(p, b, h_kv), values_ahead = s.tile.values_ahead(p, b, h_kv);
    for (int64_t n = 0; n < blocks; ++n) {
      const TileFrame f = frame_of_heads<T>(row, n, s.tile.count);
      const MaskTile<T> mask = gathered_mask<T>(p, b, first_head + f.i0, i, s.tile.keys, f, s.tile.bias);
      const ForwardProducts<In, T>& products = s.products[n].whole;
      const KeyStairs stairs(f);
      s.products[n].scores(row, f, scale, s.scores, keys_ahead, n == 0 ? keys_ahead.count() : 0);
      // The results of padding lanes are not read, so these lanes need not be hidden.
      TileFrame all_lanes = f;
      if (!mask.bias) all_lanes.queries = f.ld;
      ScoreTile<T> score = finish_scores<T>(row, all_lanes, mask, s.scores, nullptr);
      score.frame = f;
      const bool packed = products.packs_probs(row);
      products.softmax(f, stairs, unit, s.scores, s.row_max + f.i0, s.row_sum + f.i0, s.rescale, packed);
      if (p.dropout) {  // after the row sum: dropout applies to the normalised P
        s.tile.load_dropout(p, b, first_head + f.i0, i, f);
        multiply_rows<T>(s.scores, s.tile.dropout, f.keys * f.ld);
      }
      GradualPrefetch of_values(values_ahead, n == 0 ? values_ahead.count() : 0, f.queries * d_v / kLanes<T>);
      products.add_values(row, score, stairs, s.scores, s.rescale, s.out + f.i0 * d_v, packed, nullptr,
                          of_values.prefetch_hook());
    }
  }

  T* lse = static_cast<T*>(p.lse);
  for_row_type<In>(p.dtype, [&](auto element) {
    using Row = decltype(element);
    for (int64_t c = 0; c < heads; ++c)
      finish_row<Row, T>(p.out.row<Row>(b, first_head + c, i), s.out + c * d_v, p.sizes.head_dim_v,
                         s.row_max[c], unit, s.row_sum[c], lse[p.lse_index(b, first_head + c, i)]);
  });
}

struct IndexedWorkspace {
  KeyLists lists;
  ThreadScratch scratch;
};

template <class In, class T>
IndexedWorkspace allocate_indexed_workspace(Arena& arena, const IndexedParams& p, int threads) {
  IndexedWorkspace w;
  w.lists = allocate_key_lists(arena, p.sizes, p.indices, threads);
  w.scratch = ThreadScratch::allocate(arena, threads, [&](Arena& one) { allocate_indexed<In, T>(one, p); });
  return w;
}

template <class In, class T>
void indexed(const IndexedParams& p, void* workspace, const Parallel& parallel) {
  constexpr int64_t kRows = 4;  // rows of a task
  Arena arena(workspace);
  const IndexedWorkspace w = allocate_indexed_workspace<In, T>(arena, p, parallel.threads);
  fill_key_lists(w.lists, parallel);
  const Sizes& z = p.sizes;
  const int64_t row_blocks = ceil_div(z.seqlen_q, kRows);
  for_each_task(parallel, z.batch * z.heads_kv * row_blocks, [&](int64_t task, int thread) {
    const int64_t head = task / row_blocks, i0 = task % row_blocks * kRows;
    Arena scratch = w.scratch.of_thread(thread);
    IndexedScratch<In, T> s = allocate_indexed<In, T>(scratch, p);
    const ProductUnit<In> unit;
    for (int64_t i = i0; i < std::min(i0 + kRows, z.seqlen_q); ++i)
      forward_indexed_row<In, T>(p, w.lists, s, head / z.heads_kv, head % z.heads_kv, i);
  });
}

template <class In, class T>
size_t indexed_workspace(const IndexedParams& p, int threads) {
  Arena arena(nullptr);
  allocate_indexed_workspace<In, T>(arena, p, threads);
  return arena.used();
}
