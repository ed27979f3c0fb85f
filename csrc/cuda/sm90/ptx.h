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
__device__ inline void load_box(void* shared, const void* tensor_map, const int32_t (&corner)[4],
                                Barrier& barrier) {
  ::cuda::ptx::cp_async_bulk_tensor(::cuda::ptx::space_cluster, ::cuda::ptx::space_global, shared, tensor_map,
                                    corner, &barrier);
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

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Two neighbours of a row, rounded, as they lie in memory.
template <class In>
__device__ inline uint32_t pack(float first, float second) {
  uint32_t bits;
  if constexpr (std::is_same_v<In, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  } else {
    static_assert(std::is_same_v<In, __nv_bfloat16>);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  }
  return bits;
}

// 2^x within 2 ulp; denormal results become 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash_attn_ext::cuda::ptx

#endif
