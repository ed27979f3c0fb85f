// The part of the call that a block of the backward computes.
#pragma once

#include <cuda.h>

#include "../call_of_block.cuh"
#include "backward_schedule.h"
#include "band.h"
#include "nan_rows.cuh"
#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm90 {

struct BackwardArguments {
  CUtensorMap q, k, v, dout;
  BackwardParams p;
  ShortBand band;
  ScoreScale score;
  BackwardWorkspace w;
  KeyTileOrder order;
  int heads_of_kv_head;

  FA_HOST_DEVICE HiddenByKeyMask hidden() const { return {}; }
};

// The part of a block: for each head, `row_tiles` tiles of queries from `first_tile` on.
struct BackwardRange {
  int b, h_kv, key_tile, first_head, heads, first_tile, row_tiles;
  int last_key_tile;        // the last tile of keys that any query sees
  int workspace_tile;       // the first tile of its sequence in the workspace, for head 0
  int q_row, k_row, map_b;  // the first rows of its sequence in the tensor maps
  ShortBand band;           // the band of its sequence; not used by plain kernels

  __device__ int tiles() const { return heads * row_tiles; }
};

// Iterates over the tiles of queries of a block, head after head.
struct RowTileCursor {
  int head, tile;

  __device__ RowTileCursor(const BackwardArguments&, const BackwardRange& range)
      : head(range.first_head), tile(range.first_tile) {}
  __device__ void advance(const BackwardArguments&, const BackwardRange& range) {
    if (++tile < range.first_tile + range.row_tiles) return;
    tile = range.first_tile;
    ++head;
  }
};

// The task of a block, if blocks do not draw tickets.
__device__ inline int task_of_block(const BackwardArguments&) { return blockIdx.x; }

// The number of tiles of queries that a block visits.
__device__ inline int tiles_of(const BackwardArguments&, const BackwardRange& range) { return range.tiles(); }

template <class Config>
__device__ BackwardRange backward_range(const BackwardArguments& a, int block) {
  const KeyTile task = a.order(block);
  const BackwardParams& p = call_of_block<Config>(a.p, task.b);
  const Sizes& z = p.sizes;
  BackwardRange range;
  range.b = task.b;
  range.h_kv = task.h_kv;
  range.key_tile = task.tile;
  range.heads = a.heads_of_kv_head;
  range.first_head = range.h_kv * range.heads;
  const int64_t begin = int64_t{task.tile / Config::kSharers} * Config::kSharedKeys,
                end = begin + Config::kSharedKeys;
  const Range seen =
      visible_queries(p.band.without_chunks(), begin, end < z.seqlen_k ? end : z.seqlen_k, z.seqlen_q);
  range.first_tile = seen.begin / Config::kRows;
  range.row_tiles = seen.begin < seen.end ? ceil_div(seen.end, Config::kRows) - range.first_tile : 0;
  range.last_key_tile = a.order.tiles - 1;
  range.workspace_tile = a.w.tiles.first(p, task.b);
  range.q_row = range.k_row = 0;
  range.map_b = range.b;
  if constexpr (!Config::kPlain) {
    const Range tiles = a.w.key_mask.seen_tiles(task.b, a.order.tiles);
    range.last_key_tile = tiles.end - 1;
    if (begin >= z.seqlen_k || task.tile < tiles.begin || task.tile >= tiles.end) range.row_tiles = 0;
    range.band = ShortBand(p);
    if (p.varlen) {
      range.q_row = static_cast<int>(p.varlen.first_q);
      range.k_row = static_cast<int>(p.varlen.first_k);
      range.map_b = 0;
    }
  }
  return range;
}

}  // namespace flash_attn_ext::cuda::sm90
