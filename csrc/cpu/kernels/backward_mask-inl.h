// Gradient of a float mask, in the mask's own broadcast shape: dmask = sum of dS over what the mask was
// broadcast.
//
// A pass of its own (two more products a tile): it is parallel over the mask's elements, each task summing
// the batches, heads and rows that share its tile in a fixed order, so that nothing of size S_q x S_k is ever
// stored that the mask itself is not.
#pragma once

#include "backward_workspace-inl.h"

template <class Out, class T>
void store_mask_tile(const MaskGrad& g, int64_t mb, int64_t mh, int64_t i0, int64_t j0, int64_t rows,
                     int64_t cols, const T* tile, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    Out* out = static_cast<Out*>(g.data) + ((mb * g.heads + mh) * g.rows + i0 + r) * g.cols + j0;
    for (int64_t c = 0; c < cols; ++c) {
      if constexpr (std::is_arithmetic_v<Out>) {
        out[c] = static_cast<Out>(tile[r * ld + c]);
      } else {
        out[c].bits = from_float(splat(static_cast<float>(tile[r * ld + c])), Out{})[0];
      }
    }
  }
}

// Adds dS of one score tile to the mask tile; a mask that is broadcast along rows or columns takes their sum.
template <class T>
void add_to_mask_tile(const MaskGrad& g, const TileFrame& f, const T* dscores, T* tile, int64_t tile_ld) {
  for (int64_t r = 0; r < f.queries; ++r)
    for (int64_t c = 0; c < f.keys; ++c)
      tile[(g.rows == 1 ? 0 : r) * tile_ld + (g.cols == 1 ? 0 : c)] += dscores[r * f.ld + c];
}

// Adds dS of the queries and keys that share one mask tile, of one head.
template <class Pass>
void add_shared_scores(Pass& pass, int64_t b, int64_t h, const Range& queries, const Range& keys) {
  using T = typename Pass::T;
  const auto [block_q, block_k] = backward_tiling<T>();
  const BackwardParams& p = pass.p;
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += block_k) {
    const int64_t count = std::min(block_k, keys.end - j0);
    const Range seen = visible_queries(p.band, j0, j0 + count, queries.end);
    if (std::max(seen.begin, queries.begin) >= seen.end) continue;
    pass.load_keys(b, p.sizes.kv_head(h), j0, count);
    for (int64_t i0 = queries.begin; i0 < queries.end; i0 += block_q) {
      const TileFrame f{
          b, h, i0, j0, std::min(block_q, queries.end - i0), count, round_up_to_lanes<T>(count), false};
      if (pass.recompute(f).empty) continue;
      add_to_mask_tile<T>(p.dmask, f, pass.s.dscores, pass.s.dmask, block_k);
    }
  }
}

template <class Pass>
void backward_mask(const typename Pass::Params& call, const typename Pass::Workspace& w,
                   const Parallel& parallel) {
  using T = typename Pass::T;
  using Params = typename Pass::Params;
  const auto [block_q, block_k] = backward_tiling<T>();
  const MaskGrad& g = call.dmask;
  const bool by_row = call.varlen && call.varlen.mask_by_row;

  for_each_task(
      parallel, w.mask_tasks.total, [&, block_q = block_q, block_k = block_k](int64_t task, int thread) {
        const auto [sequence, index] = w.mask_tasks.at(task);
        const Params own = by_row ? of_sequence(call, sequence) : call;
        const MaskTiles tiles = mask_tiles<T>(own);
        const int64_t mj = index % tiles.col_blocks * block_k;
        const int64_t mi = index / tiles.col_blocks % tiles.row_blocks * block_q;
        const int64_t mh = index / (tiles.col_blocks * tiles.row_blocks) % g.heads;
        const int64_t mb = index / (tiles.col_blocks * tiles.row_blocks * g.heads);
        const ProductUnit<typename Pass::In> unit;
        T* const dmask = Pass(call, own, w, thread).s.dmask;
        std::fill(dmask, dmask + block_q * block_k, T(0));

        // What shares this mask tile: one block where the mask has the dimension, everything where it is
        // broadcast.
        const Range batches = by_row         ? Range{sequence, sequence + 1}
                              : g.batch == 1 ? Range{0, call.sizes.batch}
                                             : Range{mb, mb + 1};
        const Range heads = g.heads == 1 ? Range{0, call.sizes.heads} : Range{mh, mh + 1};
        for (int64_t b = batches.begin; b < batches.end; ++b) {
          const Params p = of_sequence(call, b);
          Pass pass(call, p, w, thread);
          const int64_t seqlen_q = p.sizes.seqlen_q, seqlen_k = p.sizes.seqlen_k;
          const Range queries =
              g.rows == 1 ? Range{0, seqlen_q} : Range{mi, std::min(mi + block_q, seqlen_q)};
          const Range keys = g.cols == 1 ? Range{0, seqlen_k} : Range{mj, std::min(mj + block_k, seqlen_k)};
          for (int64_t h = heads.begin; h < heads.end; ++h) add_shared_scores(pass, b, h, queries, keys);
        }

        const int64_t first = by_row ? own.varlen.first_q : 0;
        const int64_t end = by_row ? first + own.sizes.seqlen_q : g.rows;
        const int64_t rows = std::min(block_q, end - first - mi), cols = std::min(block_k, g.cols - mj);
        switch (call.mask.dtype) {
          case DType::kFloat32:
            return store_mask_tile<float, T>(g, mb, mh, first + mi, mj, rows, cols, dmask, block_k);
          case DType::kFloat64:
            return store_mask_tile<double, T>(g, mb, mh, first + mi, mj, rows, cols, dmask, block_k);
          case DType::kBFloat16:
            return store_mask_tile<BFloat16, T>(g, mb, mh, first + mi, mj, rows, cols, dmask, block_k);
          case DType::kFloat16:
            return store_mask_tile<Float16, T>(g, mb, mh, first + mi, mj, rows, cols, dmask, block_k);
          case DType::kBool: return;  // has no gradient: checked in ops/checks.cpp
        }
      });
}
