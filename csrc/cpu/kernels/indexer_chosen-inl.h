// The indexer's scores at keys that the caller has chosen, and their gradients. Rows of keys are gathered to tiles.
#pragma once

#include "indexer_gradients-inl.h"

// The visible keys among `count` slots of a row of indices, from slot `first` on.
struct GatheredKeys {
  int64_t count = 0;
  int64_t slot[kIndexerBlockK], key[kIndexerBlockK];

  static GatheredKeys of(const IndexerParams& p, const ChosenKeys& chosen, int64_t b, int64_t i,
                         int64_t first) {
    const Range seen = indexer_keys(p, b, i, i + 1);
    const int32_t* row = chosen.indices + (b * p.seqlen_q + i) * chosen.topk;
    GatheredKeys r;
    for (int64_t n = first; n < std::min(first + kIndexerBlockK, chosen.topk); ++n) {
      const int64_t j = row[n];
      if (j < 0 || j < seen.begin || j >= seen.end || !p.key_is_visible(b, j)) continue;
      r.slot[r.count] = n;
      r.key[r.count++] = j;
    }
    return r;
  }
};

template <class T>
void load_gathered_keys(const IndexerParams& p, const IndexerTile<T>& t, const GatheredKeys& keys) {
  for_row_type<T>(p.dtype, [&](auto element) {
    for (int64_t r = 0; r < keys.count; ++r) t.template load_key<decltype(element)>(p, t.b, keys.key[r], r);
  });
}

template <class T>
ThreadScratch allocate_indexer_scores(Arena& arena, const IndexerScoresParams& p, int threads) {
  return ThreadScratch::allocate(arena, threads, [&](Arena& one) { IndexerTile<T>::allocate(one, p); });
}

template <class T>
size_t indexer_scores_workspace(const IndexerScoresParams& p, int threads) {
  Arena arena(nullptr);
  allocate_indexer_scores<T>(arena, p, threads);
  return arena.used();
}

template <class T>
void indexer_scores(const IndexerScoresParams& p, void* workspace, const Parallel& parallel) {
  Arena arena(workspace);
  const ThreadScratch scratch = allocate_indexer_scores<T>(arena, p, parallel.threads);
  const int64_t blocks = ceil_div(p.seqlen_q, kIndexerBlockQ);
  for_each_task(parallel, p.batch * blocks, [&](int64_t task, int thread) {
    Arena own = scratch.of_thread(thread);
    auto t = IndexerTile<T>::allocate(own, p);
    const int64_t b = task / blocks, i0 = task % blocks * kIndexerBlockQ;
    for (int64_t i = i0; i < std::min(i0 + kIndexerBlockQ, p.seqlen_q); ++i) {
      T* row = static_cast<T*>(p.scores) + (b * p.seqlen_q + i) * p.chosen.topk;
      std::fill(row, row + p.chosen.topk, kNegInf<T>);
      t.load_query(p, b, i);
      for (int64_t first = 0; first < p.chosen.topk; first += kIndexerBlockK) {
        const GatheredKeys keys = GatheredKeys::of(p, p.chosen, b, i, first);
        if (keys.count == 0) continue;
        load_gathered_keys<T>(p, t, keys);
        t.compute_scores(p, 0, keys.count);
        for (int64_t r = 0; r < keys.count; ++r) row[keys.slot[r]] = t.scores[r];
      }
    }
  });
}

template <class T>
struct IndexerScoresBackwardScratch {
  IndexerTile<T> tile;
  QueryGradients<T> sums;
  T* dk;       // [kIndexerBlockK][d]
  T* dscores;  // [kIndexerBlockK]

  static IndexerScoresBackwardScratch allocate(Arena& arena, const IndexerParams& p) {
    IndexerScoresBackwardScratch s;
    s.tile = IndexerTile<T>::allocate(arena, p);
    s.sums = QueryGradients<T>::allocate(arena, p);
    s.dk = arena.take<T>(kIndexerBlockK * s.tile.d);
    s.dscores = arena.take<T>(kIndexerBlockK + kLanes<T>);
    return s;
  }
};

// Adds the gradients of gathered keys; their dscores are in s.dscores.
template <class T>
void add_gathered_gradients(const IndexerParams& p, const IndexerScoresBackwardScratch<T>& s,
                            const GatheredKeys& keys, const KeyGradientParts<T>& dk, int64_t part) {
  std::fill(s.dk, s.dk + keys.count * s.tile.d, T(0));
  add_indexer_gradients<T>(p, s.tile, 0, keys.count, s.dscores, s.sums, s.dk);
  for (int64_t r = 0; r < keys.count; ++r)
    add_rows<T>(dk.row(p, s.tile.b, part, keys.key[r]), s.dk + r * s.tile.d, s.tile.d);
}

// The workspace of the backward of the scores, and of the loss.
template <class T>
struct IndexerBackwardWorkspace {
  ThreadScratch scratch;
  KeyGradientParts<T> dk;
};

template <class T>
IndexerBackwardWorkspace<T> allocate_indexer_scores_backward(Arena& arena, const IndexerParams& p,
                                                             int threads) {
  const auto lay_out = [&](Arena& one) { IndexerScoresBackwardScratch<T>::allocate(one, p); };
  const ThreadScratch scratch = ThreadScratch::allocate(arena, threads, lay_out);
  return {scratch, KeyGradientParts<T>::allocate(arena, p)};
}

template <class T>
size_t indexer_scores_backward_workspace(const IndexerScoresBackwardParams& p, int threads) {
  Arena arena(nullptr);
  allocate_indexer_scores_backward<T>(arena, p, threads);
  return arena.used();
}

template <class T>
void indexer_scores_backward(const IndexerScoresBackwardParams& p, void* workspace,
                             const Parallel& parallel) {
  Arena arena(workspace);
  const auto w = allocate_indexer_scores_backward<T>(arena, p, parallel.threads);
  const KeyGradientParts<T>& dk = w.dk;
  for_each_query_of_parts<T>(
      p, dk, kIndexerBlockQ, parallel, [&](int64_t b, int64_t i0, int64_t queries, int64_t part, int thread) {
        Arena own = w.scratch.of_thread(thread);
        auto s = IndexerScoresBackwardScratch<T>::allocate(own, p);
        for (int64_t i = i0; i < i0 + queries; ++i) {
          const T* dscores = static_cast<const T*>(p.dscores) + (b * p.seqlen_q + i) * p.chosen.topk;
          s.tile.load_query(p, b, i);
          s.sums.clear(p);
          for (int64_t first = 0; first < p.chosen.topk; first += kIndexerBlockK) {
            const GatheredKeys keys = GatheredKeys::of(p, p.chosen, b, i, first);
            if (keys.count == 0) continue;
            load_gathered_keys<T>(p, s.tile, keys);
            s.tile.compute_scores(p, 0, keys.count);
            for (int64_t r = 0; r < keys.count; ++r) s.dscores[r] = dscores[keys.slot[r]];
            add_gathered_gradients<T>(p, s, keys, dk, part);
          }
          s.sums.store_to(p, p.gradients, b, i);
        }
      });
  dk.store_to(p, p.gradients, parallel);
}
