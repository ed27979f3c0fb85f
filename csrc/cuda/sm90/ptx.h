// Hopper's instructions, one function each: CCCL's where it has them, own ones for the rest. A host run
// (tests/cuda_host) brings its own.
#pragma once

#if !defined(__CUDACC__)
#include <hopper_on_host.h>
#define FA_HAS_HOPPER 1
#else

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FA_HAS_HOPPER 1  // elsewhere the kernels trap; the selector does not send calls there
#endif

#include <cuda_runtime.h>

#include <cstdint>
#include <cuda/ptx>

#include "../ptx.h"
#include "wgmma.h"

namespace flash_attn_ext::cuda::ptx {

// An mbarrier: completes a phase when all expected threads have arrived and all expected bytes have landed.
using Barrier = uint64_t;

__device__ inline void barrier_init(Barrier& barrier, uint32_t arrivals) {
  ::cuda::ptx::mbarrier_init(&barrier, arrivals);
}

// Makes this thread's barrier_init visible to TMA.
__device__ inline void barrier_init_fence() {
  ::cuda::ptx::fence_mbarrier_init(::cuda::ptx::sem_release, ::cuda::ptx::scope_cluster);
}

__device__ inline void barrier_arrive(Barrier& barrier) {
  ::cuda::ptx::mbarrier_arrive(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta, ::cuda::ptx::space_shared,
                               &barrier);
}

// Arrives, and expects so many bytes of TMA in this phase.
__device__ inline void barrier_arrive_expecting(Barrier& barrier, uint32_t bytes) {
  ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                         ::cuda::ptx::space_shared, &barrier, bytes);
}

// Waits until the phase of this parity is complete; the phase before the first counts as complete, parity 1.
__device__ inline void barrier_wait(Barrier& barrier, uint32_t parity) {
  while (!::cuda::ptx::mbarrier_try_wait_parity(&barrier, parity)) {
  }
}

// TMA: copies a box from `corner` (innermost first) on to shared memory, and counts its bytes on the barrier.
// What lies outside of the tensor arrives as zeros.
template <int kRank>
__device__ void load_box(void* shared, const void* tensor_map, const int32_t (&corner)[kRank],
                         Barrier& barrier) {
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, shared, tensor_map,
                                    corner, &barrier);
}

// TMA: copies a box from shared memory to `corner` on, some time before the waits for its batch, as bulk_add.
// What lies outside of the tensor is not written.
template <int kRank>
__device__ void store_box(const void* tensor_map, const int32_t (&corner)[kRank], const void* shared) {
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_global, ::cuda::ptx::space_shared, tensor_map, corner,
                                    shared);
}

// Copies `bytes`, a multiple of 16, from global to shared memory, and counts them on the barrier.
__device__ inline void load_bytes(void* shared, const void* global, uint32_t bytes, Barrier& barrier) {
  ::cuda::ptx::cp_async_bulk(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, shared, global, bytes,
                             &barrier);
}

// Adds `count` floats of shared memory to those in global memory, some time before the waits for its batch:
// until the first, shared memory may still be read; at the second, the sums are there.
__device__ inline void bulk_add(float* sums, const float* terms, uint32_t count) {
  ::cuda::ptx::cp_reduce_async_bulk(::cuda::ptx::space_global, ::cuda::ptx::space_shared, ::cuda::ptx::op_add,
                                    sums, terms, count * static_cast<uint32_t>(sizeof(float)));
}
__device__ inline void bulk_commit() { ::cuda::ptx::cp_async_bulk_commit_group(); }
__device__ inline void bulk_wait_read() {
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>{});
}
__device__ inline void bulk_wait() { ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<0>{}); }

// Makes what this thread wrote to shared memory visible to wgmma and to bulk copies, of those threads that it
// meets after this.
__device__ inline void proxy_fence() { ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared); }

// Some of a block's threads meet; __syncthreads for kThreads of them.
template <int kBarrier, int kThreads>
__device__ inline void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ inline void named_barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Turns (../ptx.h) of blocks that add in bulk. The fences are there because another unit makes the additions:
// one keeps them behind the wait, the other puts them before the end of the turn.
__device__ inline void acquire_bulk_turn(const int32_t* turns, int turn) {
  acquire_turn(turns, turn);
  ::cuda::ptx::fence_proxy_async();
}
__device__ inline void release_bulk_turn(int32_t* turns) {
  ::cuda::ptx::fence_proxy_async();
  release_turn(turns);
}

// Stores four 8 x 8 matrices of 16-bit elements. Lane l points to row l % 8 of matrix l / 8, and has of each
// matrix the elements (l / 4, 2 (l % 4)) and the next one.
__device__ inline void store_matrices(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// All four warps of a warpgroup hand registers back to the pool, or wait for more from it.
template <int kRegisters>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_attn_ext::cuda::ptx

#endif
