// In which order tiles of K and V come to shared memory, while the products of other tiles run.
#pragma once

#include "../ptx.h"

namespace flash_attn_ext::cuda::sm80 {

// Two buffers: the next tile's K and V are loaded while this tile's are used. One buffer: V is loaded while K is used,
// and the next K while V is used.
template <class C, class LoadK, class LoadV>
struct TileCopies {
  static constexpr bool kDouble = C::kBuffers == 2;
  static constexpr int kLater = kDouble ? 1 : 0;  // the newest groups, which no wait is for yet

  const LoadK& load_k;  // (j0, buffer): starts to copy the tile from key j0 on
  const LoadV& load_v;
  const int64_t end;  // of the keys

  // Group by group, an empty one too: the waits count groups.
  __device__ void start_k(int64_t j0, int buffer) const {
    if (j0 < end) load_k(j0, buffer);
    ptx::cp_async_commit();  // ends the group of k
  }
  __device__ void start_v(int64_t j0, int buffer) const {
    if (j0 < end) load_v(j0, buffer);
    ptx::cp_async_commit();  // ends the group of v
  }

  // The first tile. What the caller has started to copy lands with its K.
  __device__ void start(int64_t j0) const {
    start_k(j0, 0);
    if (kDouble) start_v(j0, 0);
  }

  // Until the block may read K of the tile from key j0 on, and then V.
  __device__ void wait_for_k(int64_t j0, int buffer) const {
    ptx::cp_async_wait<kLater>();  // this thread's part of q and k has landed; v may be on its way
    __syncthreads();               // everyone's part has; everyone has read the other k, or, of one, v
    if constexpr (kDouble) {
      start_k(j0 + C::kBlockK, buffer ^ 1);
    } else {
      start_v(j0, 0);
    }
  }
  __device__ void wait_for_v(int64_t j0, int buffer) const {
    ptx::cp_async_wait<kLater>();  // this thread's part of v has landed; the next k may be on its way
    __syncthreads();               // everyone's part has; everyone has read the other v, or, of one, k
    if constexpr (kDouble) {
      start_v(j0 + C::kBlockK, buffer ^ 1);
    } else {
      start_k(j0 + C::kBlockK, 0);
    }
  }
};

template <class C, class LoadK, class LoadV>
__device__ TileCopies<C, LoadK, LoadV> copies_of(const LoadK& load_k, const LoadV& load_v, int64_t end) {
  return {load_k, load_v, end};
}

}  // namespace flash_attn_ext::cuda::sm80
