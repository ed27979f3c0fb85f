// The attention weights, averaged over the heads, from lse: W = 1/H sum_h P_h, after dropout.
//
// A task is a key block and a few query blocks of one sequence. It adds P of all heads, head by head, in its scratch
// memory. So no array of size H x S_q x S_k is stored, and the bits do not depend on the number of threads. The
// gradient is computed by the backward of attention with dP given (`dweights`).
#pragma once

#include "backward-inl.h"

constexpr int64_t kWeightsBlocks =
    4;  // query blocks per task. A head's keys are transposed once for all of these blocks

template <class In, class T>
struct WeightsScratch {
  BackwardScratch<In, T> tile;
  T* sum;  // [kWeightsBlocks * block_q][block_k]
};

template <class In, class T>
WeightsScratch<In, T> allocate_weights(Arena& arena, const WeightsParams& p) {
  const auto [block_q, block_k] = backward_tiling<T>();
  WeightsScratch<In, T> s;
  s.tile = allocate_backward<In, T>(arena, p);
  s.sum =
      arena.take<T>(fitted(kWeightsBlocks * block_q, p.sizes.seqlen_q) * fitted(block_k, p.sizes.seqlen_k));
  return s;
}

template <class In, class T>
BackwardWorkspace<T> allocate_weights_pass(Arena& arena, const WeightsParams& p, int threads) {
  Arena scratch(nullptr);
  allocate_weights<In, T>(scratch, p);
  return allocate_backward_workspace<In, T>(arena, p, threads, scratch.used());
}

// Adds P of one tile, after dropout, to the rows of `sum`.
template <class In, class T>
void add_weights_of_tile(const WeightsParams& p, BackwardScratch<In, T>& s, const TileFrame& f,
                         const RowTerms<T>& rows, T* sum) {
  for_each_shown_part<In, T>(p, s, f, [&](const ScoreTile<T>&) {  // one part: there are no functions
    if (p.dropout) load_dropout_tile<T>(p, f, s.dropout_tile);
    for_row_size<In>(p.dtype, [&](auto element) {
      for (int64_t r = 0; r < f.queries; ++r) {
        const T reference = rows.reference[f.i0 + r], correction = rows.correction[f.i0 + r];
        for (int64_t n = r * f.ld; n < (r + 1) * f.ld; n += kLanes<T>) {
          const Vec<T> prob = prob_of<decltype(element), T>(load<T>(s.probs + n), reference, correction);
          store<T>(sum + n, load<T>(sum + n) + (p.dropout ? prob * load<T>(s.dropout_tile + n) : prob));
        }
      }
    });
  });
}

template <class In, class T>
void weights(const WeightsParams& p, void* workspace, const Parallel& parallel) {
  constexpr int64_t block_q = backward_tiling<T>().block_q, block_k = backward_tiling<T>().block_k;
  Arena arena(workspace);
  const BackwardWorkspace<T> w = allocate_weights_pass<In, T>(arena, p, parallel.threads);
  const Sizes& z = p.sizes;
  const int64_t task_rows = kWeightsBlocks * block_q;
  const int64_t columns = ceil_div(z.seqlen_k, block_k), tasks = columns * ceil_div(z.seqlen_q, task_rows);
  compute_row_terms<In, T>(p, w, parallel);

  for_each_task(parallel, z.batch * tasks, [&](int64_t n, int thread) {
    const int64_t b = n / tasks, j0 = n % columns * block_k, first = n % tasks / columns * task_rows;
    const int64_t end = std::min(first + task_rows, z.seqlen_q);
    const int64_t keys = std::min(block_k, z.seqlen_k - j0), ld = round_up_to_lanes<T>(keys);
    const Range seen = visible_queries(p.band, j0, j0 + keys, z.seqlen_q);
    Arena scratch = thread_arena(w, thread);
    const ProductUnit<In> unit;
    auto [tile, sum] = allocate_weights<In, T>(scratch, p);
    std::fill(sum, sum + (end - first) * ld, T(0));
    for (int64_t h = 0; h < z.heads; ++h) {
      tile.products.load_keys(p, b, z.kv_head(h), j0, keys);
      for (int64_t i0 = first; i0 < end; i0 += block_q) {
        const TileFrame f{b, h, i0, j0, std::min(block_q, end - i0), keys, ld, false};
        if (i0 >= seen.end || i0 + f.queries <= seen.begin) continue;
        add_weights_of_tile<In, T>(p, tile, f, w.rows.of_head(p, b, h), sum + (i0 - first) * ld);
      }
    }
    for_row_type<In>(p.dtype, [&, sums = sum](auto element) {
      using Row = decltype(element);
      for (int64_t i = first; i < end; ++i)
        store_row<Row, T>(p.weights.row<Row>(b, 0, i) + j0, sums + (i - first) * ld, keys,
                          T(1) / static_cast<T>(z.heads));
    });
  });
}

template <class In, class T>
size_t weights_workspace(const WeightsParams& p, int threads) {
  Arena arena(nullptr);
  allocate_weights_pass<In, T>(arena, p, threads);
  return arena.used();
}
