// Backward of attention by index, without atomics.
//
// A task owns a range of the keys of one key head and visits all query rows in ascending order. So only this task adds
// to the rows of dK and dV of its keys, in a fixed order. The tasks of a key head add to the same dQ in turns
// (turns.h), in the order of the keys. The shape decides the ranges, so the bits depend neither on the threads nor on
// the batch.
#pragma once

#include "indexed_backward_tile-inl.h"

// The ranges of the keys of a head.
struct KeyRanges {
  int64_t count, keys;  // keys of a range

  explicit KeyRanges(const IndexedBackwardParams& p) {
    constexpr int64_t kOfRow =
        128;  // a row's keys in a range: loading Q and dO takes as long as some 16 keys
    constexpr int64_t kKeys = 256, kTasks = 32;
    const Sizes& z = p.sizes;
    const int64_t of_row = std::min(p.indices.count * p.indices.block_size, z.seqlen_k);
    count = std::min({of_row / kOfRow, z.seqlen_k / kKeys, ceil_div(kTasks, z.heads_kv)});
    keys = ceil_div(z.seqlen_k, std::max<int64_t>(count, 1));
    count = ceil_div(z.seqlen_k, keys);
  }
  Range at(int64_t n, int64_t seqlen_k) const { return {n * keys, std::min((n + 1) * keys, seqlen_k)}; }
};

template <class T>
struct IndexedBackwardWorkspace {
  KeyLists lists;
  RowTerms<T> rows;
  T* dq;                 // [rows of lse][D]; null: dq itself has the accumulator's type
  T* dslopes;            // [ranges][B][H]
  Turn::Counter* turns;  // [ranges][B][H_kv]
  ThreadScratch scratch;
};

template <class In, class T>
IndexedBackwardWorkspace<T> allocate_indexed_backward_workspace(Arena& arena, const IndexedBackwardParams& p,
                                                                int threads) {
  const KeyRanges ranges(p);
  const Sizes& z = p.sizes;
  IndexedBackwardWorkspace<T> w;
  w.lists = allocate_key_lists(arena, z, p.indices, threads);
  w.rows = {arena.take<T>(p.lse_size()), arena.take<T>(p.lse_size()), arena.take<T>(p.lse_size())};
  const bool adds_to_dq = bytes_of(p.dtype) == static_cast<int64_t>(sizeof(T)) || !p.dq;
  w.dq = adds_to_dq ? nullptr : arena.take<T>(p.lse_size() * round_up_to_lanes<T>(z.head_dim));
  w.dslopes = p.dalibi_slopes ? arena.take<T>(ranges.count * z.batch * z.heads) : nullptr;
  w.turns = arena.take<Turn::Counter>(ranges.count * z.batch * z.heads_kv);
  w.scratch = ThreadScratch::allocate(
      arena, threads, [&](Arena& one) { allocate_indexed_backward<In, T>(one, p, ranges.keys); });
  return w;
}

// The row of dQ that tasks add to.
template <class T>
T* dq_row(const BackwardParams& p, const IndexedBackwardWorkspace<T>& w, int64_t b, int64_t h, int64_t i) {
  if (!w.dq) return p.dq.row<T>(b, h, i);
  return w.dq + p.lse_index(b, h, i) * round_up_to_lanes<T>(p.sizes.head_dim);
}

// Computes the row terms of the heads of one key head, and sets their rows of dQ to 0.
template <class In, class T>
void indexed_row_terms(const IndexedBackwardParams& p, const IndexedBackwardWorkspace<T>& w,
                       IndexedBackwardScratch<In, T>& s, int64_t b, int64_t h_kv, int64_t i) {
  const Sizes& z = p.sizes;
  const int64_t heads = z.heads / z.heads_kv, first_head = h_kv * heads;
  const T *lse = static_cast<const T*>(p.lse), *dlse = static_cast<const T*>(p.dlse);
  const auto at = [&](int64_t c) { return p.lse_index(b, first_head + c, i); };
  bool exact = true;
  for (int64_t c = 0; c < heads; ++c) exact &= lse_holds_sum<T>(lse[at(c)]);
  if (!exact)
    IndexedBackwardRow<In, T>{p, s, b, h_kv, i}.sum_row_terms(
        w.lists.cursor(b, h_kv, i, visible_keys(p.band, i, i + 1, z.seqlen_k)));
  for (int64_t c = 0; c < heads; ++c) {
    const int64_t n = at(c), h = first_head + c;
    T &delta = w.rows.delta[n], &reference = w.rows.reference[n], &correction = w.rows.correction[n];
    if (exact || !std::isfinite(lse[n])) {
      delta = for_row_type<In>(p.dtype, [&](auto element) {
        using Row = decltype(element);
        return dot_rows<Row, T>(p.dout.row<Row>(b, h, i), p.out.row<Row>(b, h, i), z.head_dim_v);
      });
      reference = lse[n] == kNegInf<T> ? -kNegInf<T> : lse[n];
      correction = T(0);
    } else {
      delta = s.rows.delta[c] / s.rows.correction[c];
      reference = s.rows.reference[c];
      correction = std::log(s.rows.correction[c]);
    }
    if (dlse) delta -= dlse[n];
    if (p.dq) std::fill_n(dq_row<T>(p, w, b, h, i), z.head_dim, T(0));
  }
}

template <class T>
void scatter_add(const T* tile, const int32_t* keys, int64_t count, int64_t first, int64_t cols, T* sums) {
  const int64_t ld = round_up_to_lanes<T>(cols);
  for (int64_t r = 0; r < count; ++r) add_rows<T>(sums + (keys[r] - first) * ld, tile + r * ld, ld);
}

// Adds one query row's part of dQ, dK and dV for the keys of `within`. Waits for its turn before it adds to dQ.
template <class In, class T>
void backward_indexed_row(const IndexedBackwardParams& p, const IndexedBackwardWorkspace<T>& w,
                          IndexedBackwardScratch<In, T>& s, int64_t b, int64_t h_kv, int64_t i,
                          const Range& within, int64_t first_key, const Turn& turn) {
  const int64_t d = round_up_to_lanes<T>(p.sizes.head_dim);
  IndexedBackwardRow<In, T> row{p, s, b, h_kv, i};
  KeyCursor cursor = w.lists.cursor(b, h_kv, i, within);
  const KeyCursor following = w.lists.cursor(b, h_kv, std::min(i + 1, p.sizes.seqlen_q - 1), within);
  if (!row.next_tile(cursor, following)) return;
  row.load_queries();
  for (int64_t c = 0; c < row.heads; ++c) {
    const int64_t at = p.lse_index(b, row.first_head + c, i);
    s.rows.delta[c] = w.rows.delta[at];
    s.rows.reference[c] = w.rows.reference[at];
    s.rows.correction[c] = w.rows.correction[at];
  }
  std::fill(s.dq, s.dq + row.heads * d, T(0));
  do {
    for (int64_t n = 0; n < row.blocks; ++n) {
      const TileFrame f = frame_of_heads<T>(row.row, n, s.tile.count);
      const ScoreTile<T> score = row.recompute(f, n);
      if (s.dslopes) row.add_slope_gradients(f);
      if (s.dv) s.dout_heads[n].multiply(score, s.probs, s.dv_tile, n > 0);
      unscale_dscores<T>(p, f, s.tanh_tile, s.dscores);
      if (s.dk) s.q_heads[n].multiply(score, s.dscores, s.dk_tile, n > 0);
      if (p.dq)
        s.dout_products[n].whole.add_values(row.swapped, score, KeyStairs(f), s.dscores, nullptr,
                                            s.dq + f.i0 * d);
    }
    if (s.dk) scatter_add<T>(s.dk_tile, s.tile.keys, s.tile.count, first_key, p.sizes.head_dim, s.dk);
    if (s.dv) scatter_add<T>(s.dv_tile, s.tile.keys, s.tile.count, first_key, p.sizes.head_dim_v, s.dv);
  } while (row.next_tile(cursor, following));
  if (!p.dq) return;
  turn.wait_for(i);
  for (int64_t c = 0; c < row.heads; ++c) {
    T* sum = dq_row<T>(p, w, b, row.first_head + c, i);
    for (int64_t n = 0, cols = p.sizes.head_dim; n < cols; n += kLanes<T>)
      store_columns<T>(sum + n, load_columns<T>(sum + n, cols - n) + load<T>(s.dq + c * d + n), cols - n);
  }
}

template <class In, class T>
void backward_key_range(const IndexedBackwardParams& p, const IndexedBackwardWorkspace<T>& w,
                        IndexedBackwardScratch<In, T>& s, int64_t b, int64_t h_kv, const Range& keys,
                        const Turn& turn) {
  const Sizes& z = p.sizes;
  const int64_t d = round_up_to_lanes<T>(z.head_dim), d_v = round_up_to_lanes<T>(z.head_dim_v);
  if (s.dk) std::fill_n(s.dk, (keys.end - keys.begin) * d, T(0));
  if (s.dv) std::fill_n(s.dv, (keys.end - keys.begin) * d_v, T(0));
  if (s.dslopes) std::fill_n(s.dslopes, z.heads / z.heads_kv, T(0));
  turn.begin(0);
  for (int64_t i = 0; i < z.seqlen_q; ++i) {
    const Range seen = visible_keys(p.band, i, i + 1, z.seqlen_k);
    const Range within{std::max(seen.begin, keys.begin), std::min(seen.end, keys.end)};
    if (within.begin < within.end) backward_indexed_row<In, T>(p, w, s, b, h_kv, i, within, keys.begin, turn);
    turn.finish(i, i + 1 < z.seqlen_q ? i + 1 : Turn::kNone);
  }
  for_row_type<In>(p.dtype, [&](auto element) {
    using Row = decltype(element);
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      const int64_t n = j - keys.begin;
      if (s.dk) store_row<Row, T>(p.dk.row<Row>(b, h_kv, j), s.dk + n * d, z.head_dim, T(1));
      if (s.dv) store_row<Row, T>(p.dv.row<Row>(b, h_kv, j), s.dv + n * d_v, z.head_dim_v, T(1));
    }
  });
}

// Stores dQ if tasks added to a workspace, and sums the parts of the slopes' gradients.
template <class In, class T>
void reduce_indexed(const IndexedBackwardParams& p, const IndexedBackwardWorkspace<T>& w, int64_t ranges,
                    const Parallel& parallel) {
  const Sizes& z = p.sizes;
  const int64_t heads = z.batch * z.heads;
  for_each_task(parallel, heads, [&](int64_t n, int) {
    const int64_t b = n / z.heads, h = n % z.heads;
    if (w.dq)
      for_row_type<In>(p.dtype, [&](auto element) {
        using Row = decltype(element);
        for (int64_t i = 0; i < z.seqlen_q; ++i)
          store_row<Row, T>(p.dq.row<Row>(b, h, i), dq_row<T>(p, w, b, h, i), z.head_dim, T(1));
      });
    if (!w.dslopes) return;
    T sum = 0;
    for (int64_t range = 0; range < ranges; ++range) sum += w.dslopes[range * heads + n];
    static_cast<T*>(p.dalibi_slopes)[n] = sum;
  });
}

template <class In, class T>
void indexed_backward(const IndexedBackwardParams& p, void* workspace, const Parallel& parallel) {
  constexpr int64_t kRows = 16;  // rows of a task that computes row terms
  Arena arena(workspace);
  const auto w = allocate_indexed_backward_workspace<In, T>(arena, p, parallel.threads);
  const KeyRanges ranges(p);
  const Sizes& z = p.sizes;
  const int64_t key_heads = z.batch * z.heads_kv, row_blocks = ceil_div(z.seqlen_q, kRows);
  const auto scratch_of = [&](int thread) {
    Arena scratch = w.scratch.of_thread(thread);
    return allocate_indexed_backward<In, T>(scratch, p, ranges.keys);
  };
  fill_key_lists(w.lists, parallel);
  for_each_task(parallel, key_heads * row_blocks, [&](int64_t n, int thread) {
    IndexedBackwardScratch<In, T> s = scratch_of(thread);
    const ProductUnit<In> unit;
    const int64_t head = n / row_blocks, i0 = n % row_blocks * kRows;
    for (int64_t i = i0; i < std::min(i0 + kRows, z.seqlen_q); ++i)
      indexed_row_terms<In, T>(p, w, s, head / z.heads_kv, head % z.heads_kv, i);
  });
  if (p.dsink) {
    BackwardWorkspace<T> only_rows{};
    only_rows.rows = w.rows;
    sink_gradient(static_cast<const BackwardParams&>(p), only_rows, parallel,
                  [&](const BackwardParams& own, int64_t b, int64_t h, int64_t i) {
                    return w.rows.of_head(own, b, h).delta[i];
                  });
  }
  if (!p.wants_qkv_pass()) return;
  for (int64_t n = 0; n < ranges.count * key_heads; ++n) new (w.turns + n) Turn::Counter(-1);
  for_each_task(parallel, ranges.count * key_heads, [&](int64_t n, int thread) {
    IndexedBackwardScratch<In, T> s = scratch_of(thread);
    const ProductUnit<In> unit;
    const int64_t range = n / key_heads, b = n % key_heads / z.heads_kv, h_kv = n % z.heads_kv;
    const Turn turn(range == 0 ? nullptr : w.turns + n - key_heads, w.turns + n);
    backward_key_range<In, T>(p, w, s, b, h_kv, ranges.at(range, z.seqlen_k), turn);
    const int64_t heads = z.heads / z.heads_kv;
    if (s.dslopes) std::copy_n(s.dslopes, heads, w.dslopes + (range * z.batch + b) * z.heads + h_kv * heads);
  });
  reduce_indexed<In, T>(p, w, ranges.count, parallel);
}

template <class In, class T>
size_t indexed_backward_workspace(const IndexedBackwardParams& p, int threads) {
  Arena arena(nullptr);
  allocate_indexed_backward_workspace<In, T>(arena, p, threads);
  return arena.used();
}
