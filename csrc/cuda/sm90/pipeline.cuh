// Pipelines of tiles between the warps of a block.
#pragma once

#include <cuda.h>

#include "panels.h"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kWarpgroup = 128, kWarpgroupRows = 64;

struct NoExtra {};

// Tiles for the consumers. TMA loads them, or warps of the producer warpgroup write them. Tile n is in stage n % kStages.
// It is the (n / kStages)-th tile of this stage, which gives the parity of the barriers' phase.
template <class Tile, int kStages = 2, class SharedExtra = NoExtra>
struct Pipeline {
  Tile tiles[kStages];
  ptx::Barrier full[kStages];   // the tile has landed, or its producers have written it
  ptx::Barrier empty[kStages];  // all consumer warps have read it
  SharedExtra extra;            // other shared memory of the block, in the padding before the aligned tiles

  __device__ static uint32_t stage(uint32_t n) { return n % kStages; }
  __device__ static uint32_t parity(uint32_t n) { return n / kStages % 2; }

  __device__ void init(uint32_t consumer_warps, uint32_t producers = 1) {
    for (int n = 0; n < kStages; ++n) {
      ptx::barrier_init(full[n],
                        producers);  // arrivals: the thread that loads, or one lane of each producer warp
      ptx::barrier_init(empty[n], consumer_warps);  // arrivals: one lane of each consumer warp
    }
  }

  // Consumers: waits for tile n. Returns its offset in bytes from the first stage.
  __device__ uint32_t wait(uint32_t n) {
    ptx::barrier_wait(full[stage(n)], parity(n));  // the tile is complete
    return stage(n) * sizeof(Tile);
  }

  // Consumers: releases tile n, which this warp has read.
  __device__ void release(uint32_t n) {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(empty[stage(n)]);  // the producer may overwrite it
  }
};

// Loads a tile. The caller loads `more` bytes on the same barrier.
template <class Tile>
__device__ void load_tile(Tile& tile, const CUtensorMap& map, int row, int h, int b, ptx::Barrier& full,
                          uint32_t more = 0) {
  ptx::barrier_arrive_expecting(full, sizeof(tile.bytes) + more);  // the phase ends when they have landed
  for (int n = 0; n < Tile::kCount; ++n)
    ptx::load_box(tile.bytes[n], &map, {n * kPanelColumns, row, h, b}, full);
}

// Loads rows of several heads of a group. `in_group`: the first of these heads.
template <class Tile>
__device__ void load_group_tile(Tile& tile, const CUtensorMap& map, int in_group, int row, int h_kv, int b,
                                ptx::Barrier& full) {
  ptx::barrier_arrive_expecting(full, sizeof(tile.bytes));  // the phase ends when all bytes have landed
  for (int n = 0; n < Tile::kCount; ++n)
    ptx::load_box(tile.bytes[n], &map, {n * kPanelColumns, in_group, row, h_kv, b}, full);
}

}  // namespace flash_attn_ext::cuda::sm90
