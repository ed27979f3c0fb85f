// Ping-pong (FlashAttention-3, section 3.1): consumer warpgroups start their products alternately. While one warpgroup
// computes its softmax, the tensor cores compute the products of the other warpgroups.
#pragma once

#include "pipeline.cuh"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

// FlashAttention-3 uses named barriers. In the loop of a persistent block they would keep descriptors out of the
// uniform registers.
template <int kConsumers>
struct PingPong {
  // One barrier for each warpgroup. A phase ends when the warpgroup has started its products.
  ptx::Barrier started[kConsumers];

  __device__ void init() {
    for (ptx::Barrier& barrier : started) ptx::barrier_init(barrier, 4);  // arrivals: one lane of each warp
  }
  // Waits for the n-th turn of a warpgroup.
  __device__ void wait(int warpgroup, uint32_t n) {
    const bool first = warpgroup == 0;
    const int before = first ? kConsumers - 1 : warpgroup - 1;
    ptx::barrier_wait(started[before], (n + first) % 2);  // the warpgroup before has started its products
  }
  // Ends the turn. The products' instructions synchronise each warp, so all lanes have issued them.
  __device__ void pass(int warpgroup) {
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(started[warpgroup]);  // the next warpgroup may start
  }
};

}  // namespace flash_attn_ext::cuda::sm90
