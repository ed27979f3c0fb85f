// Tiles between the warps of a block: who may touch one, and when.
#pragma once

#include <cuda.h>

#include "panels.h"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kWarpgroup = 128, kWarpgroupRows = 64;

struct NoExtra {};

// Tiles on their way from the producer to the consumers: of two stages, tile n is in stage n % 2, for the
// (n / 2)-th time.
template <class Tile, int kStages = 2, class SharedExtra = NoExtra>
struct Pipeline {
  Tile tiles[kStages];
  ptx::Barrier full[kStages];   // the tile has landed
  ptx::Barrier empty[kStages];  // all consumer warps have read it
  SharedExtra extra;            // what else the block shares: the alignment of the tiles leaves room here

  __device__ static uint32_t stage(uint32_t n) { return n % kStages; }
  __device__ static uint32_t parity(uint32_t n) { return n / kStages % 2; }

  __device__ void init(uint32_t consumer_warps) {
    for (int n = 0; n < kStages; ++n) {
      ptx::barrier_init(full[n], 1);                // the producer
      ptx::barrier_init(empty[n], consumer_warps);  // one lane of each
    }
  }

  // Consumers: returns by how many bytes tile n lies behind the first stage, when it is there.
  __device__ uint32_t wait(uint32_t n) {
    ptx::barrier_wait(full[stage(n)], parity(n));  // TMA has written the tile
    return stage(n) * sizeof(Tile);
  }

  // Consumers: this warp has read tile n.
  __device__ void release(uint32_t n) {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(empty[stage(n)]);  // the producer may overwrite it
  }
};

// The caller brings `more` bytes on the same barrier.
template <class Tile>
__device__ void load_tile(Tile& tile, const CUtensorMap& map, int row, int h, int b, ptx::Barrier& full,
                          uint32_t more = 0) {
  ptx::barrier_arrive_expecting(full, sizeof(tile.bytes) + more);  // the phase ends when they have landed
  for (int n = 0; n < Tile::kCount; ++n)
    ptx::load_box(tile.bytes[n], &map, {n * kPanelColumns, row, h, b}, full);
}

// Rows of several heads of a group, the first of them head `in_group` of it.
template <class Tile>
__device__ void load_group_tile(Tile& tile, const CUtensorMap& map, int in_group, int row, int h_kv, int b,
                                ptx::Barrier& full) {
  ptx::barrier_arrive_expecting(full, sizeof(tile.bytes));  // the phase ends when they have landed
  for (int n = 0; n < Tile::kCount; ++n)
    ptx::load_box(tile.bytes[n], &map, {n * kPanelColumns, in_group, row, h_kv, b}, full);
}

}  // namespace flash_attn_ext::cuda::sm90
