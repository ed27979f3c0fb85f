// The order of copies as in tile_copies.cuh, for GPUs without cp.async (compute capability 7.5).
#pragma once

#include "../ptx.h"
#include "tile.cuh"

namespace flash_attn_ext::cuda::sm80 {

// K and V have one buffer. The K or V of the next step is fetched to registers before the products, and written to shared
// memory after them.
template <class C, class KeyTile, class FetchK, class FetchV>
struct StagedCopies {
  static_assert(C::kBuffers == 1);
  const FetchK& fetch_k;  // (j0, staged): fetches the tile from key j0 on
  const FetchV& fetch_v;
  KeyTile &k, &v;
  const int end;                                 // the end of the keys
  StagedTile<KeyTile, C::kThreads> staged = {};  // alternately a tile of K and a tile of V

  __device__ void start(int j0) {
    ptx::cp_async_commit();  // ends the group of q
    if (j0 < end) fetch_k(j0, staged);
  }
  __device__ void wait_for_k(int j0, int, int) {
    staged.store(k);          // all have read the last K before they waited for V
    ptx::cp_async_wait<0>();  // this thread's part of q has landed
    __syncthreads();          // publishes q and k
    fetch_v(j0, staged);
  }
  __device__ void wait_for_v(int next, int) {
    staged.store(v);  // all have read the last V before they waited for K
    __syncthreads();  // publishes v
    if (next < end) fetch_k(next, staged);
  }
};

template <class C, class KeyTile, class FetchK, class FetchV>
__device__ StagedCopies<C, KeyTile, FetchK, FetchV> staged_copies_of(const FetchK& fetch_k,
                                                                     const FetchV& fetch_v, KeyTile& k,
                                                                     KeyTile& v, int end) {
  return {fetch_k, fetch_v, k, v, end};
}

}  // namespace flash_attn_ext::cuda::sm80
