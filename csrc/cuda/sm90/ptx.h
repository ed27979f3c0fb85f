// Hopper's instructions, one function each. If CCCL has an instruction, its function is used. The host build
// (tests/cuda_host) replaces this file.
#pragma once

#if !defined(__CUDACC__)
#include <hopper_on_host.h>
#define FA_HAS_HOPPER 1
#else

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FA_HAS_HOPPER 1  // on other GPUs the kernels trap; the selector does not choose them
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

// Arrives, and adds `bytes` to the bytes that this phase expects.
__device__ inline void barrier_arrive_expecting(Barrier& barrier, uint32_t bytes) {
  ::cuda::ptx::mbarrier_arrive_expect_tx(::cuda::ptx::sem_release, ::cuda::ptx::scope_cta,
                                         ::cuda::ptx::space_shared, &barrier, bytes);
}

// Arrives at the barrier in the same place of block `rank` of the cluster. A release at the scope of the cluster would wait
// for all earlier accesses of the thread (MEMBAR.ALL.GPU, in the main loop). It is not needed, as in CUTLASS: nothing that
// the thread wrote is published, and its reads by wgmma have ended.
__device__ inline void barrier_arrive_in_cluster(Barrier& barrier, uint32_t rank) {
  asm volatile(
      "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// Waits until the phase with this parity is complete. The phase before the first phase has parity 1 and counts as
// complete.
__device__ inline void barrier_wait(Barrier& barrier, uint32_t parity) {
  while (!::cuda::ptx::mbarrier_try_wait_parity(&barrier, parity)) {
  }
}

// Waits until all threads of the cluster have called it. Each thread then sees the earlier writes of all threads.
__device__ inline void cluster_sync() {
  ::cuda::ptx::barrier_cluster_arrive(::cuda::ptx::sem_release);
  ::cuda::ptx::barrier_cluster_wait(::cuda::ptx::sem_acquire);
}

// TMA: copies a box that starts at `corner` (innermost coordinate first) to shared memory, and counts its bytes on the
// barrier. Elements outside the tensor are zeros.
template <int kRank>
__device__ void load_box(void* shared, const void* tensor_map, const int32_t (&corner)[kRank],
                         Barrier& barrier) {
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, shared, tensor_map,
                                    corner, &barrier);
}

// The same copy into the same place of several blocks of the cluster: those with a bit in `blocks`. In each of them the
// bytes are counted on the block's own barrier, which is in the same place, too.
template <int kRank>
__device__ void load_box_into_blocks(void* shared, const void* tensor_map, const int32_t (&corner)[kRank],
                                     Barrier& barrier, uint16_t blocks) {
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, shared, tensor_map,
                                    corner, &barrier, blocks);
}

// TMA: copies a box from shared memory to `corner`. The copy is complete when bulk_wait returns. Until bulk_wait_read
// returns, shared memory may still be read. Elements outside the tensor are not written.
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

// Adds `count` floats of shared memory to floats in global memory. The same waits as for store_box.
__device__ inline void bulk_add(float* sums, const float* terms, uint32_t count) {
  ::cuda::ptx::cp_reduce_async_bulk(::cuda::ptx::space_global, ::cuda::ptx::space_shared, ::cuda::ptx::op_add,
                                    sums, terms, count * static_cast<uint32_t>(sizeof(float)));
}
__device__ inline void bulk_commit() { ::cuda::ptx::cp_async_bulk_commit_group(); }
__device__ inline void bulk_wait_read() {
  ::cuda::ptx::cp_async_bulk_wait_group_read(::cuda::ptx::n32_t<0>{});
}
__device__ inline void bulk_wait() { ::cuda::ptx::cp_async_bulk_wait_group(::cuda::ptx::n32_t<0>{}); }

// Makes this thread's writes to shared memory visible to wgmma and bulk copies of threads that synchronise with it
// after this call.
__device__ inline void proxy_fence() { ::cuda::ptx::fence_proxy_async(::cuda::ptx::space_shared); }

// A barrier for kThreads threads of the block.
template <int kBarrier, int kThreads>
__device__ inline void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ inline void named_barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Ordered adds (../ptx.h) of bulk copies. The fences are needed because another unit adds. The first fence keeps the
// adds after the wait. The second fence keeps the adds before the end of the turn.
__device__ inline void acquire_bulk_turn(const int32_t* turns, int turn) {
  acquire_turn(turns, turn);
  ::cuda::ptx::fence_proxy_async();
}
__device__ inline void release_bulk_turn(int32_t* turns) {
  ::cuda::ptx::fence_proxy_async();
  release_turn(turns);
}

// Stores four 8 x 8 matrices of 16-bit elements. Lane l points to row l % 8 of matrix l / 8, and holds the elements (l
// / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1) of each matrix.
__device__ inline void store_matrices(void* row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Rounds four neighbours of a row to float8_e4m3fn, in the order of memory. Beyond 448 the result is 448.
__device__ inline uint32_t pack_float8(float x0, float x1, float x2, float x3) {
  uint32_t bits;
  asm("{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; "
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3; mov.b32 %0, {low, high};}"
      : "=r"(bits)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return bits;
}

// Four of the eight bytes of (low, high), chosen by the four digits of `selector`, the lowest first.
__device__ inline uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}

// Sets the number of registers of a warpgroup's threads; claiming waits until other warpgroups have released enough.
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
