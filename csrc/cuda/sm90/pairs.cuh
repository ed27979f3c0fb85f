// Pairs of blocks: clusters of two, with neighbouring query rows of a head. Each block loads half of the panels of every
// tile of K and V, by multicast to both blocks. So a pair reads K and V once from L2, not twice.
//
// Both blocks walk the same tiles. A full barrier counts the bytes of both halves. The half of the other block may land
// before this block's producer expects it, but not before the phase begins. For a producer writes to both blocks, so it
// waits until the consumers of both blocks have released the stage.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "forward_range.cuh"
#include "pipeline.cuh"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kPairBlocks = 2;
constexpr uint16_t kBothBlocks = 0b11;

template <class Tile>
struct PairPipeline : Pipeline<Tile> {
  using Pipeline<Tile>::stage;
  using Pipeline<Tile>::parity;

  // consumer_warps: of one block.
  __device__ void init(uint32_t consumer_warps) { Pipeline<Tile>::init(kPairBlocks * consumer_warps); }

  // Consumers: releases tile n in both blocks. Lane r arrives at the barrier of block r.
  __device__ void release(uint32_t n) {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < kPairBlocks)
      ptx::barrier_arrive_in_cluster(this->empty[stage(n)], lane);  // both producers may overwrite it
  }

  // The producer: loads this block's half of tile n into both blocks.
  __device__ void load_half(uint32_t n, const CUtensorMap& map, int row, int h, int b) {
    static_assert(Tile::kCount % kPairBlocks == 0);
    constexpr int kHalf = Tile::kCount / kPairBlocks;
    Tile& tile = this->tiles[stage(n)];
    ptx::Barrier& full = this->full[stage(n)];
    // The consumers of both blocks have read tile n - 2.
    ptx::barrier_wait(this->empty[stage(n)], parity(n) ^ 1);
    ptx::barrier_arrive_expecting(full, sizeof(tile.bytes));  // the phase ends when both halves have landed
    const int first = rank_in_pair() * kHalf;
    for (int panel = first; panel < first + kHalf; ++panel)
      ptx::load_box_into_blocks(tile.bytes[panel], &map, {panel * kPanelColumns, row, h, b}, full,
                                kBothBlocks);
  }
};

// load_next() of forward.cuh for a pair.
template <class Tile>
__device__ void load_next(PairPipeline<Tile>& pipeline, uint32_t n, const CUtensorMap& map, int key,
                          const BlockRange& range) {
  pipeline.load_half(n, map, range.k_row + key, range.h_kv, range.map_b);
}

// After all tasks: no block ends while the other block may still write to its shared memory or arrive at its barriers.
__device__ inline void leave_pair() {
  ptx::cluster_sync();  // all threads of both blocks have used both pipelines
}

// A pair's pipeline, or a block's.
template <class Tile, bool kPaired>
using PipelineOf = std::conditional_t<kPaired, PairPipeline<Tile>, Pipeline<Tile>>;

}  // namespace flash_attn_ext::cuda::sm90
