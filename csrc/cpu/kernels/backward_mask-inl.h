// Gradient of a float mask, in the mask's own broadcast shape: dmask = sum of dS over the broadcast dimensions.
//
// These loops run after the loops for q, k and v, and compute two more products per tile. Tasks are parallel over
// the elements of the mask. A task sums over the batches, heads and rows that share its mask tile, in a fixed order.
// So the memory has the size of the mask, never S_q x S_k. If the mask has few elements, many score tiles share an
// element. Then several tasks sum parts of the score tiles, and the parts are added in order.
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

// Adds dS of one score tile to the mask tile. If the mask is broadcast along rows or columns, adds the sum over them.
template <class T>
void add_to_mask_tile(const MaskGrad& g, const TileFrame& f, const T* dscores, T* tile, int64_t tile_ld) {
  for (int64_t r = 0; r < f.queries; ++r)
    for (int64_t c = 0; c < f.keys; ++c)
      tile[(g.rows == 1 ? 0 : r) * tile_ld + (g.cols == 1 ? 0 : c)] += dscores[r * f.ld + c];
}

// Adds dS of one head, for the queries and keys that share one mask tile. Score tiles are counted key block by key
// block; only the score tiles in `part` are added.
template <class Pass>
void add_shared_scores(Pass& pass, int64_t b, int64_t h, const Range& queries, const Range& keys,
                       const Range& part) {
  using T = typename Pass::T;
  const Tiling tiling = backward_tiling<T>();  // lambdas of C++17 capture no structured binding
  const int64_t block_q = tiling.block_q, block_k = tiling.block_k;
  const BackwardParams& p = pass.p;
  int64_t n = 0;  // number of the first score tile of the key block
  for (int64_t j0 = keys.begin; j0 < keys.end; j0 += block_k) {
    const int64_t count = std::min(block_k, keys.end - j0),
                  blocks = ceil_div(queries.end - queries.begin, block_q);
    const Range own = {queries.begin + clamp_to(part.begin - n, 0, blocks) * block_q,
                       std::min(queries.begin + clamp_to(part.end - n, 0, blocks) * block_q, queries.end)};
    n += blocks;
    const Range seen = visible_queries(p.band, j0, j0 + count, own.end);
    if (std::max(seen.begin, own.begin) >= seen.end) continue;
    pass.load_keys(b, p.sizes.kv_head(h), j0, count);
    for (int64_t i0 = own.begin; i0 < own.end; i0 += block_q) {
      const TileFrame f{b,    h, i0, j0, std::min(block_q, own.end - i0), count, round_up_to_lanes<T>(count),
                        false};
      pass.recompute(f, [&](const ScoreTile<T>&) {  // one part: a tile with a float mask is not cut
        add_to_mask_tile<T>(p.dmask, f, pass.s.dscores, pass.s.dmask, block_k);
      });
    }
  }
}

// The mask tile of a task, or one part of its sum.
template <class T>
struct MaskTask {
  int64_t mb, mh, mi, mj, part;  // mi, mj: first row and first column

  MaskTask(const MaskTiles& tiles, int64_t n) {
    const auto [block_q, block_k] = backward_tiling<T>();
    const auto digit = [&n](int64_t base) {
      const int64_t value = n % base;
      n /= base;
      return value;
    };
    part = digit(tiles.parts);
    mj = digit(tiles.col_blocks) * block_k;
    mi = digit(tiles.row_blocks) * block_q;
    mh = digit(tiles.heads);
    mb = n;
  }
};

// Stores the rows of a finished tile that exist in the mask. Row 0 of `sums` is row `first` of the tile.
template <class T>
void store_mask_rows(const BackwardParams& own, const MaskTask<T>& task, int64_t first, int64_t count,
                     const T* sums) {
  const int64_t block_k = backward_tiling<T>().block_k;
  const MaskGrad& g = own.dmask;
  const bool by_row = own.varlen && own.varlen.mask_by_row;
  const int64_t before = by_row ? own.varlen.first_q : 0, rows_of_mask = by_row ? own.sizes.seqlen_q : g.rows;
  const int64_t i = task.mi + first, rows = std::min(count, rows_of_mask - i),
                cols = std::min(block_k, g.cols - task.mj);
  for_float_mask<T>(own.mask.dtype, [&](auto element) {  // a bool mask has no gradient (ops/checks)
    store_mask_tile<decltype(element), T>(g, task.mb, task.mh, before + i, task.mj, rows, cols, sums,
                                          block_k);
  });
}

// Adds to pass.s.dmask: dS of all score tiles that share the mask tile, or of the score tiles in its part.
template <class Pass>
void sum_mask_tile(const typename Pass::Params& call, const typename Pass::Workspace& w, int thread,
                   const Range& batches, const MaskTiles& tiles, const MaskTask<typename Pass::T>& task) {
  const auto [block_q, block_k] = backward_tiling<typename Pass::T>();
  const MaskGrad& g = call.dmask;
  const Range heads = g.heads == 1 ? Range{0, call.sizes.heads} : Range{task.mh, task.mh + 1};
  int64_t before = 0;  // number of score tiles in the heads before
  for (int64_t b = batches.begin; b < batches.end; ++b) {
    const typename Pass::Params p = of_sequence(call, b);
    const Sizes& z = p.sizes;
    const Range queries =
        g.rows == 1 ? Range{0, z.seqlen_q} : Range{task.mi, std::min(task.mi + block_q, z.seqlen_q)};
    const Range keys =
        g.cols == 1 ? Range{0, z.seqlen_k} : Range{task.mj, std::min(task.mj + block_k, z.seqlen_k)};
    const int64_t of_head = ceil_div(std::max<int64_t>(queries.end - queries.begin, 0), block_q) *
                            ceil_div(std::max<int64_t>(keys.end - keys.begin, 0), block_k);
    const int64_t of_heads = of_head * (heads.end - heads.begin);
    Range part{0, std::numeric_limits<int64_t>::max()};
    if (tiles.parts > 1) {  // then all sequences have the same lengths
      const int64_t all = of_heads * (batches.end - batches.begin);
      part = {all * task.part / tiles.parts, all * (task.part + 1) / tiles.parts};
    }
    if (before < part.end && before + of_heads > part.begin) {
      Pass pass(call, p, w, thread);
      for (int64_t h = heads.begin, first = before; h < heads.end; ++h, first += of_head)
        add_shared_scores(pass, b, h, queries, keys, {part.begin - first, part.end - first});
    }
    before += of_heads;
  }
}

template <class Pass>
void backward_mask(const typename Pass::Params& call, const typename Pass::Workspace& w,
                   const Parallel& parallel) {
  using T = typename Pass::T;
  using Params = typename Pass::Params;
  constexpr int64_t block_k = backward_tiling<T>().block_k;
  const MaskGrad& g = call.dmask;
  const bool by_row = call.varlen && call.varlen.mask_by_row;

  for_each_task(parallel, w.mask_tasks.total, [&](int64_t n, int thread) {
    const auto [sequence, index] = w.mask_tasks.at(n);
    const Params own = by_row ? of_sequence(call, sequence) : call;
    const MaskTiles tiles = mask_tiles<T>(own);
    const MaskTask<T> task(tiles, index);
    const ProductUnit<typename Pass::In> unit;
    T* const sums = Pass(call, own, w, thread).s.dmask;
    std::fill(sums, sums + tiles.rows * block_k, T(0));

    // The score tiles that share this mask tile: one block if the mask has the dimension, all blocks if the mask
    // is broadcast along it.
    const Range batches = by_row         ? Range{sequence, sequence + 1}
                          : g.batch == 1 ? Range{0, call.sizes.batch}
                                         : Range{task.mb, task.mb + 1};
    sum_mask_tile<Pass>(call, w, thread, batches, tiles, task);
    if (tiles.parts > 1)
      std::copy(sums, sums + tiles.rows * block_k, w.dmask + n * tiles.rows * block_k);
    else
      store_mask_rows<T>(own, task, 0, tiles.rows, sums);
  });

  const MaskTiles tiles = mask_tiles<T>(call);
  if (tiles.parts == 1) return;
  constexpr int64_t kRows = 16;  // rows per task that adds parts
  const int64_t bands = ceil_div(tiles.rows, kRows), size = tiles.rows * block_k;
  for_each_task(parallel, tiles.count() * bands, [&](int64_t n, int) {
    const int64_t tile = n / bands, row = n % bands * kRows, rows = std::min(kRows, tiles.rows - row);
    T* sums = w.dmask + tile * tiles.parts * size + row * block_k;
    for (int64_t part = 1; part < tiles.parts; ++part) add_rows<T>(sums, sums + part * size, rows * block_k);
    store_mask_rows<T>(call, MaskTask<T>(tiles, tile * tiles.parts), row, rows, sums);
  });
}
