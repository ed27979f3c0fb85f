// Gradients of the tensors that a score function captures: tables, slopes, temperatures.
//
// As in backward_mask-inl.h, dS of each tile is recomputed. The scatter_add instructions of a program add to sums. The
// shape alone cuts the tiles into parts. Each part has separate sums, which are added in order, so the bits do not
// depend on the threads.
#pragma once

#include "backward_mask-inl.h"

template <class Pass>
void add_captured_of_block(Pass& pass, int64_t b, int64_t h, int64_t j0, double* sums) {
  using T = typename Pass::T;
  const auto [block_q, block_k] = backward_tiling<T>();
  const BackwardParams& p = pass.p;
  const Sizes& z = p.sizes;
  const int64_t keys = std::min(block_k, z.seqlen_k - j0);
  const Range seen = visible_queries(p.band, j0, j0 + keys, z.seqlen_q);
  if (seen.begin >= seen.end) return;
  pass.load_keys(b, z.kv_head(h), j0, keys);
  for (int64_t i0 = seen.begin / block_q * block_q; i0 < seen.end; i0 += block_q) {
    const TileFrame f{b,    h, i0, j0, std::min(block_q, seen.end - i0), keys, round_up_to_lanes<T>(keys),
                      false};
    pass.recompute(f, [&](const ScoreTile<T>& score) {
      add_captured_gradients<T>(p, score.frame, pass.s.mask.functions, pass.s.dscores, sums);
    });
  }
}

template <class Pass>
void backward_captured(const typename Pass::Params& call, const typename Pass::Workspace& w,
                       const Parallel& parallel) {
  using T = typename Pass::T;
  const int64_t count = call.functions->captured_count, parts = w.captured_parts,
                tasks = w.captured_tasks.total;
  for_each_task(parallel, parts, [&](int64_t part, int thread) {
    double* sums = w.dcaptured + part * count;
    std::fill(sums, sums + count, 0.0);
    const ProductUnit<typename Pass::In> unit;
    for (int64_t n = tasks * part / parts; n < tasks * (part + 1) / parts; ++n) {
      const TaskList::Task task = w.captured_tasks.at(n);
      const typename Pass::Params p = of_sequence(call, task.b);
      const auto [b, h, block] = HeadBlocks(p.sizes, count_key_blocks<T>(p), 1).at(task);
      Pass pass(call, p, w, thread);
      add_captured_of_block(pass, b, h, block * backward_tiling<T>().block_k, sums);
    }
  });
  constexpr int64_t kElements = 4096;  // elements of a task
  for_each_task(parallel, ceil_div(count, kElements), [&](int64_t task, int) {
    T* gradient = static_cast<T*>(call.functions->dcaptured);
    for (int64_t n = task * kElements; n < std::min((task + 1) * kElements, count); ++n) {
      double sum = 0;
      for (int64_t part = 0; part < parts; ++part) sum += w.dcaptured[part * count + n];
      gradient[n] = static_cast<T>(sum);
    }
  });
}
