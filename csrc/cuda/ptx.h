// PTX instructions that C++ cannot express, one function each, with separate forms for compute capability 7.5. The host
// build (tests/cuda_host) replaces this file.
#pragma once

#if defined(FLASH_ATTN_EXT_CUDA_ON_HOST)
#include <ptx_on_host.h>
#else

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace flash_attn_ext::cuda::ptx {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// On the host, where the blocks of a cluster share an array, it returns this block's part.
__device__ inline unsigned char* shared_of_block(unsigned char* bytes) { return bytes; }

// Returns the same address, but the compiler has no information about it, so it cannot remove a check of the alignment.
__device__ inline uint32_t opaque_shared_address(const void* pointer) {
  uint32_t address = shared_address(pointer);
  asm volatile("" : "+r"(address));
  return address;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800

// Before compute capability 8.0: copies synchronously, through registers. The waits do nothing.
__device__ inline void cp_async_16(void* shared, const void* global, bool inside) {
  *static_cast<uint4*>(shared) = inside ? __ldg(static_cast<const uint4*>(global)) : make_uint4(0, 0, 0, 0);
}
__device__ inline void cp_async_4(void* shared, const void* global, bool inside) {
  *static_cast<uint32_t*>(shared) = inside ? __ldg(static_cast<const uint32_t*>(global)) : 0;
}
__device__ inline void cp_async_commit() {}
template <int kPending>
__device__ inline void cp_async_wait() {}

#else

// Starts to copy 16 bytes from global to shared memory; writes zeros if not `inside`. The copy lands before the wait
// for its group returns.
__device__ inline void cp_async_16(void* shared, const void* global, bool inside) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(inside ? 16 : 0)
               : "memory");
}

// The same for 4 bytes.
__device__ inline void cp_async_4(void* shared, const void* global, bool inside) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(inside ? 4 : 0)
               : "memory");
}

// Ends a group of this thread's copies.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last kPending groups of this thread have landed.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#endif

// Loads four 8 x 8 matrices of 16-bit elements. Lane l points to row l % 8 of matrix l / 8. It receives these elements
// of each matrix: (l / 4, 2 (l % 4)) and (l / 4, 2 (l % 4) + 1); if transposed, (2 (l % 4), l / 4) and (2 (l % 4) + 1,
// l / 4).
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b: a is 16 x 16, b is 16 x 8 of In (__half or __nv_bfloat16), c is 16 x 8. With g = lane / 4 and t = lane % 4,
// a lane holds the elements (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of c.
template <class In>
__device__ inline void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  if constexpr (!std::is_same_v<In, __half>) __trap();  // these GPUs have no product of bfloat16
  // Two products with 8 columns of a each: registers 0 and 1, and registers 2 and 3.
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0));
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[2]), "r"(a[3]), "r"(b1));
#else
  if constexpr (std::is_same_v<In, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(std::is_same_v<In, __nv_bfloat16>);
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// A mask of the bits [first, first + count); bits from 32 on are dropped.
__device__ inline uint32_t bit_mask(uint32_t first, uint32_t count) {
  uint32_t mask;
  asm("bmsk.clamp.b32 %0, %1, %2;" : "=r"(mask) : "r"(first), "r"(count));
  return mask;
}

// Returns the first lane's x. The compiler then knows that all lanes have the same value.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// 2^x within 2 ulp. Subnormal results become 0.
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// log2 x within 2^-22: of the result, or absolutely for x from 0.5 to 2. x is normal.
__device__ inline float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp. For x beyond 2^126 the result is 0.
__device__ inline float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds two neighbours of a row to 16 bits, in the order of memory: one instruction for both.
template <class In>
__device__ inline uint32_t pack(float first, float second) {
  uint32_t bits;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  const __half2 pair = __floats2half2_rn(first, second);
  memcpy(&bits, &pair, sizeof(bits));
#else
  if constexpr (std::is_same_v<In, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  } else {
    static_assert(std::is_same_v<In, __nv_bfloat16>);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  }
#endif
  return bits;
}

// ---- ordered adds of blocks

// Returns 0, 1, 2, ...: another number for each caller.
__device__ inline int draw_ticket(int* ticket) { return atomicAdd(ticket, 1); }

// Waits until `turn` blocks have ended their turns. Then this thread can read their earlier writes.
__device__ inline void acquire_turn(const int* turns, int turn) {
  int had;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                 : "=r"(had)
                 : "l"(__cvta_generic_to_global(turns))
                 : "memory");
  } while (had != turn);
}

// Ends this block's turn. Publishes all writes that this thread has made or has synchronised with.
__device__ inline void release_turn(int* turns) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(turns)) : "memory");
}

}  // namespace flash_attn_ext::cuda::ptx

#endif
