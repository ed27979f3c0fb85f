// Pairs of blocks: clusters of two blocks that visit the same tiles. Each block loads half of the panels of every tile,
// by multicast to both blocks. So a pair reads a tile once from L2, not twice.
//
// A full barrier counts the bytes of both halves. The half of the other block may land before this block's producer
// expects it, but not before the phase begins: a producer writes to both blocks, so it waits until the consumers of both
// blocks have released the stage.
//
// In a cluster, the bits of a shared address from 24 on are the number of the block. TMA, mbarriers and ordinary
// accesses need these bits. A descriptor of wgmma must not have them, because they would be in its other fields.
#pragma once

#include <cuda.h>

#include "pipeline.cuh"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kPairBlocks = 2;
constexpr uint16_t kBothBlocks = 0b11;

// A cluster of two blocks has the blocks 2 n and 2 n + 1 of the grid.
__device__ inline int rank_in_pair() { return blockIdx.x % kPairBlocks; }

// The address of shared memory for a descriptor.
template <bool kPaired>
__device__ uint32_t descriptor_address(const void* shared) {
  constexpr uint32_t kOfBlock = (1u << 24) - 1;
  const uint32_t address = ptx::shared_address(shared);
  return kPaired ? address & kOfBlock : address;
}

__device__ inline void begin_pair() {
  ptx::cluster_sync();  // publishes the barriers to all threads of both blocks
}
__device__ inline void end_pair() {
  ptx::cluster_sync();  // the other block has arrived at this block's barriers for the last time
}

template <class Tile, int kStages>
struct PairPipeline : Pipeline<Tile, kStages> {
  // consumer_warps: of one block.
  __device__ void init(uint32_t consumer_warps) {
    Pipeline<Tile, kStages>::init(kPairBlocks * consumer_warps);
  }

  // Consumers: releases tile n in both blocks. Lane r arrives at the barrier of block r.
  __device__ void release(uint32_t n) {
    const uint32_t lane = threadIdx.x % 32;
    ptx::Barrier& empty = this->empty[this->stage(n)];
    if (lane < kPairBlocks) ptx::barrier_arrive_in_cluster(empty, lane);  // both producers may overwrite it
  }
};

// Loads this block's half of a tile into both blocks. The other block loads the other half. The caller loads `more`
// bytes into this block on the same barrier.
template <class Tile>
__device__ void load_half(Tile& tile, const CUtensorMap& map, int row, int h, int b, ptx::Barrier& full,
                          uint32_t more) {
  static_assert(Tile::kCount % kPairBlocks == 0);
  constexpr int kHalf = Tile::kCount / kPairBlocks;
  const uint32_t bytes = sizeof(tile.bytes) + more;
  ptx::barrier_arrive_expecting(full, bytes);  // the phase ends when both halves have landed
  const int first = rank_in_pair() * kHalf;
  for (int panel = first; panel < first + kHalf; ++panel)
    ptx::load_box_into_blocks(tile.bytes[panel], &map, {panel * kPanelColumns, row, h, b}, full, kBothBlocks);
}

}  // namespace flash_attn_ext::cuda::sm90
