// The order in which tiles of K and V are copied to shared memory, during the products of other tiles.
#pragma once

#include "../ptx.h"
#include "tile.cuh"

namespace flash_attn_ext::cuda::sm80 {

// Two buffers: the next tile's K and V are loaded during this tile's products. One buffer: V is loaded while K is used,
// and the next K while V is used.
template <class C, class LoadK, class LoadV>
struct TileCopies {
  static constexpr bool kDouble = C::kBuffers == 2;
  static constexpr int kLater = kDouble ? 1 : 0;  // the newest groups, which need no wait yet

  const LoadK& load_k;  // (j0, buffer): starts to copy the tile from key j0 on
  const LoadV& load_v;
  const int end;  // the end of the keys

  // Each call ends a group, also an empty one, because the waits count groups.
  __device__ void start_k(int j0, int buffer) const {
    if (j0 < end) load_k(j0, buffer);
    ptx::cp_async_commit();  // ends the group of k
  }
  __device__ void start_v(int j0, int buffer) const {
    if (j0 < end) load_v(j0, buffer);
    ptx::cp_async_commit();  // ends the group of v
  }

  // Starts the first tile. Copies that the caller has started are in the same group as its K.
  __device__ void start(int j0) const {
    start_k(j0, 0);
    if (kDouble) start_v(j0, 0);
  }

  // Waits until the block may read K of the tile from key j0 on; then V. The tile from key `next` on follows.
  __device__ void wait_for_k(int j0, int next, int buffer) const {
    ptx::cp_async_wait<kLater>();  // this thread's part of q and k has landed; v may be in flight
    __syncthreads();               // all parts have landed; all have read the other k or, with one buffer, v
    if constexpr (kDouble) {
      start_k(next, buffer ^ 1);
    } else {
      start_v(j0, 0);
    }
  }
  __device__ void wait_for_v(int next, int buffer) const {
    ptx::cp_async_wait<kLater>();  // this thread's part of v has landed; the next k may be in flight
    __syncthreads();               // all parts have landed; all have read the other v or, with one buffer, k
    if constexpr (kDouble) {
      start_v(next, buffer ^ 1);
    } else {
      start_k(next, 0);
    }
  }
};

template <class C, class LoadK, class LoadV>
__device__ TileCopies<C, LoadK, LoadV> copies_of(const LoadK& load_k, const LoadV& load_v, int end) {
  return {load_k, load_v, end};
}

}  // namespace flash_attn_ext::cuda::sm80
