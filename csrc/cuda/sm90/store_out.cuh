// Stores out by TMA. Consumers write their rows to shared memory, and a thread of the producer warpgroup stores the
// tile. In the consumers' loop, the instructions of the store would prevent descriptors in uniform registers.
#pragma once

#include <cuda.h>

#include "forward_range.cuh"
#include "pipeline.cuh"
#include "rows.cuh"
#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm90 {

// The barriers between the consumers and the thread that stores out.
template <int kConsumers>
struct OutBarriers {
  ptx::Barrier full, empty;             // full: the tile in shared memory is written; empty: TMA has read it
  ptx::Barrier stored;                  // out of all tasks is in global memory
  uint32_t not_finite[kConsumers * 4];  // 1: a row of this warp, in any task, holds a NaN or Inf

  __device__ void init(uint32_t consumer_threads) {
    ptx::barrier_init(full, consumer_threads);  // arrivals: all consumer threads
    ptx::barrier_init(empty, 1);                // arrivals: the thread that stores out
    ptx::barrier_init(stored, 1);               // arrivals: the thread that stores out
    for (uint32_t& of_warp : not_finite) of_warp = 0;
  }

  // Consumers: remembers whether the thread's part of the warp's rows is finite; tells whether all rows of all tasks were.
  __device__ void remember(bool rows_are_finite) {
    const bool any = __ballot_sync(kAllLanes, !rows_are_finite) != 0;
    if (any && threadIdx.x % 32 == 0) not_finite[warp()] = 1;
  }
  __device__ bool is_finite() const { return not_finite[warp()] == 0; }

  __device__ static int warp() { return (threadIdx.x - kWarpgroup) / 32; }
};

template <class Config>
__device__ auto& out_tile(typename Config::Shared& shared) {
  if constexpr (Config::kPersistent)
    return shared.out;
  else
    return shared.q.tiles[0];
}

// Consumers: writes a warp's 16 rows of out to shared memory, from `row` of the tile on.
template <class In, class Config, int kElements>
__device__ void hand_over_out(uint32_t task, int warpgroup, int row, const float (&o)[kElements],
                              typename Config::Shared& shared) {
  auto& [full, empty, stored, not_finite] = shared.q.extra.out;
  uint32_t rounded[kElements / 8][4];
  round_weights<In>(o, rounded);
  if constexpr (Config::kPersistent)
    ptx::barrier_wait(empty, task % 2 ^ 1);  // TMA has read the last task's rows
  else
    ptx::named_barrier_sync<kWarpgroup>(1 + warpgroup);  // the products of all its warps have read Q
  store_to_tile(out_tile<Config>(shared), row, 0, rounded);
  ptx::proxy_fence();         // publishes this thread's writes to TMA
  ptx::barrier_arrive(full);  // out may be stored
}

// Stores the tile by TMA. Rows and columns that out does not have are not written.
template <class Config>
__device__ void store_out(const CUtensorMap& out, const AttentionParams& p, const BlockRange& range,
                          uint32_t task, typename Config::Shared& shared) {
  auto& [full, empty, stored, not_finite] = shared.q.extra.out;
  ptx::barrier_wait(full, task % 2);  // the consumers have written all of it
  for (int n = 0; n * kPanelColumns < p.sizes.head_dim_v; ++n)
    ptx::store_box(&out, {n * kPanelColumns, range.first_row, range.h, range.b},
                   out_tile<Config>(shared).bytes[n]);
  ptx::bulk_commit();          // ends the batch of this store
  ptx::bulk_wait_read();       // TMA has read the tile
  ptx::barrier_arrive(empty);  // the consumers may overwrite it
}

// After all tasks: waits until out is in global memory, then arrives at `stored`.
template <class Config>
__device__ void tell_that_out_is_stored(typename Config::Shared& shared) {
  auto& [full, empty, stored, not_finite] = shared.q.extra.out;
  uint32_t any = 0;
  for (const uint32_t of_warp : not_finite) any |= of_warp;
  if (any == 0) return;         // no consumer waits
  ptx::bulk_wait();             // out is in global memory
  ptx::barrier_arrive(stored);  // the consumers may repair rows of it
}

}  // namespace flash_attn_ext::cuda::sm90
