// wgmma: 64 x N += 64 x 16 times 16 x N, by a warpgroup. For thread t let g = 16 (t / 32) + t % 32 / 4 and c = 2 (t %
// 4). d[4 n + 0..3] of a thread are the accumulator's elements (g, 8 n + c), (g, 8 n + c + 1), (g + 8, 8 n + c),
// (g + 8, 8 n + c + 1). a[0..3] are the pairs of A at (g, c), (g + 8, c), (g, c + 8), (g + 8, c + 8).
//
// With 8-bit elements the product is 64 x N += 64 x 32 times 32 x N. Then a[0..3] are four adjacent elements of A each, from
// (g, 2 c), (g + 8, 2 c), (g, 2 c + 16), (g + 8, 2 c + 16) on. The accumulator is the same.
//
// The instructions run asynchronously. Until wgmma_wait, no thread may access their accumulators and operands.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_attn_ext::cuda::ptx {

// Makes this thread's writes to registers visible to later wgmma. Each batch needs a fence.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a batch.
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits for all but the last kPending batches. The compiler may then use `d` again.
template <int kPending, int kCount>
__device__ inline void wgmma_wait(float (&d)[kCount]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int n = 0; n < kCount; ++n) asm volatile("" : "+f"(d[n])::"memory");
}

// Keeps the computation of x, which is never negative, before the next wait. Otherwise ptxas would move the wait up,
// and nothing would overlap. ptxas does not know that the store to `address` never happens.
__device__ inline void compute_before_wait(float x, uint32_t address) {
  asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0;}" ::"f"(x),
               "r"(address)
               : "memory");
}

// The same for an integer; its highest bit is never set.
__device__ inline void compute_before_wait(uint32_t bits, uint32_t address) {
  asm volatile("{.reg .pred p; setp.lt.s32 p, %0, 0; @p st.shared.b32 [%1], %0;}" ::"r"(bits), "r"(address)
               : "memory");
}

// The operands of an asm statement: text "%0, %1, ..." and the accumulator's registers.
#define FA_TEXT_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FA_TEXT_32 \
  FA_TEXT_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FA_TEXT_40 \
  FA_TEXT_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FA_TEXT_48 \
  FA_TEXT_40       \
  ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FA_TEXT_56 \
  FA_TEXT_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FA_TEXT_64 \
  FA_TEXT_56       \
  ", %56, %57, %58, %59, %60, %61, %62, %63"
#define FA_TEXT_96                                                                   \
  FA_TEXT_64                                                                         \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FA_TEXT_128                                                                              \
  FA_TEXT_96                                                                                     \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define FA_FLOATS_8(n)                                                                        \
  "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3]), "+f"(d[n + 4]), "+f"(d[n + 5]), \
      "+f"(d[n + 6]), "+f"(d[n + 7])
#define FA_FLOATS_32(n) FA_FLOATS_8(n), FA_FLOATS_8(n + 8), FA_FLOATS_8(n + 16), FA_FLOATS_8(n + 24)
#define FA_FLOATS_16 FA_FLOATS_8(0), FA_FLOATS_8(8)
#define FA_FLOATS_40 FA_FLOATS_32(0), FA_FLOATS_8(32)
#define FA_FLOATS_48 FA_FLOATS_40, FA_FLOATS_8(40)
#define FA_FLOATS_56 FA_FLOATS_48, FA_FLOATS_8(48)
#define FA_FLOATS_64 FA_FLOATS_32(0), FA_FLOATS_32(32)
#define FA_FLOATS_96 FA_FLOATS_64, FA_FLOATS_32(64)
#define FA_FLOATS_128 FA_FLOATS_96, FA_FLOATS_32(96)

// The numbers of the operands follow the numbers of the accumulator.
#define FA_WGMMA_SS(TYPE, N, TEXT, FLOATS, A, B, P, BY_ROWS)                                  \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
               "k16.f32." TYPE "." TYPE " {" TEXT "}, " A ", " B ", p, 1, 1, " BY_ROWS ";}"   \
               : FLOATS                                                                       \
               : "l"(a), "l"(b), "r"(accumulate ? 1 : 0))
#define FA_WGMMA_RS(TYPE, N, TEXT, FLOATS, A, B)                                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" TEXT "}, {" A "}, " B \
               ", 1, 1, 1, 1;"                                                                            \
               : FLOATS                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d = a b, or d += a b: both from shared memory, both with contiguous k.
template <class In>
__device__ inline void wgmma_shared(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 32, FA_TEXT_16, FA_FLOATS_16, "%16", "%17", "%18", "0, 0");
  else
    FA_WGMMA_SS("bf16", 32, FA_TEXT_16, FA_FLOATS_16, "%16", "%17", "%18", "0, 0");
}
template <class In>
__device__ inline void wgmma_shared(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 64, FA_TEXT_32, FA_FLOATS_32(0), "%32", "%33", "%34", "0, 0");
  else
    FA_WGMMA_SS("bf16", 64, FA_TEXT_32, FA_FLOATS_32(0), "%32", "%33", "%34", "0, 0");
}
template <class In>
__device__ inline void wgmma_shared(float (&d)[40], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 80, FA_TEXT_40, FA_FLOATS_40, "%40", "%41", "%42", "0, 0");
  else
    FA_WGMMA_SS("bf16", 80, FA_TEXT_40, FA_FLOATS_40, "%40", "%41", "%42", "0, 0");
}
template <class In>
__device__ inline void wgmma_shared(float (&d)[56], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 112, FA_TEXT_56, FA_FLOATS_56, "%56", "%57", "%58", "0, 0");
  else
    FA_WGMMA_SS("bf16", 112, FA_TEXT_56, FA_FLOATS_56, "%56", "%57", "%58", "0, 0");
}
template <class In>
__device__ inline void wgmma_shared(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 128, FA_TEXT_64, FA_FLOATS_64, "%64", "%65", "%66", "0, 0");
  else
    FA_WGMMA_SS("bf16", 128, FA_TEXT_64, FA_FLOATS_64, "%64", "%65", "%66", "0, 0");
}

// d = a b, or d += a b: both from shared memory, a with contiguous rows and b with contiguous columns.
template <class In>
__device__ inline void wgmma_shared_by_rows(float (&d)[16], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 32, FA_TEXT_16, FA_FLOATS_16, "%16", "%17", "%18", "1, 1");
  else
    FA_WGMMA_SS("bf16", 32, FA_TEXT_16, FA_FLOATS_16, "%16", "%17", "%18", "1, 1");
}
template <class In>
__device__ inline void wgmma_shared_by_rows(float (&d)[32], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 64, FA_TEXT_32, FA_FLOATS_32(0), "%32", "%33", "%34", "1, 1");
  else
    FA_WGMMA_SS("bf16", 64, FA_TEXT_32, FA_FLOATS_32(0), "%32", "%33", "%34", "1, 1");
}
template <class In>
__device__ inline void wgmma_shared_by_rows(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 128, FA_TEXT_64, FA_FLOATS_64, "%64", "%65", "%66", "1, 1");
  else
    FA_WGMMA_SS("bf16", 128, FA_TEXT_64, FA_FLOATS_64, "%64", "%65", "%66", "1, 1");
}

// d += a b: both from shared memory, a with contiguous k and b with contiguous columns.
template <class In>
__device__ inline void wgmma_shared_right_by_rows(float (&d)[16], uint64_t a, uint64_t b) {
  constexpr bool accumulate = true;
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 32, FA_TEXT_16, FA_FLOATS_16, "%16", "%17", "%18", "0, 1");
  else
    FA_WGMMA_SS("bf16", 32, FA_TEXT_16, FA_FLOATS_16, "%16", "%17", "%18", "0, 1");
}
template <class In>
__device__ inline void wgmma_shared_right_by_rows(float (&d)[32], uint64_t a, uint64_t b) {
  constexpr bool accumulate = true;
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 64, FA_TEXT_32, FA_FLOATS_32(0), "%32", "%33", "%34", "0, 1");
  else
    FA_WGMMA_SS("bf16", 64, FA_TEXT_32, FA_FLOATS_32(0), "%32", "%33", "%34", "0, 1");
}
template <class In>
__device__ inline void wgmma_shared_right_by_rows(float (&d)[64], uint64_t a, uint64_t b) {
  constexpr bool accumulate = true;
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_SS("f16", 128, FA_TEXT_64, FA_FLOATS_64, "%64", "%65", "%66", "0, 1");
  else
    FA_WGMMA_SS("bf16", 128, FA_TEXT_64, FA_FLOATS_64, "%64", "%65", "%66", "0, 1");
}

// d += a b: a from registers, b from shared memory with contiguous columns.
template <class In>
__device__ inline void wgmma_registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_RS("f16", 64, FA_TEXT_32, FA_FLOATS_32(0), "%32, %33, %34, %35", "%36");
  else
    FA_WGMMA_RS("bf16", 64, FA_TEXT_32, FA_FLOATS_32(0), "%32, %33, %34, %35", "%36");
}
template <class In>
__device__ inline void wgmma_registers(float (&d)[48], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_RS("f16", 96, FA_TEXT_48, FA_FLOATS_48, "%48, %49, %50, %51", "%52");
  else
    FA_WGMMA_RS("bf16", 96, FA_TEXT_48, FA_FLOATS_48, "%48, %49, %50, %51", "%52");
}
template <class In>
__device__ inline void wgmma_registers(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_RS("f16", 128, FA_TEXT_64, FA_FLOATS_64, "%64, %65, %66, %67", "%68");
  else
    FA_WGMMA_RS("bf16", 128, FA_TEXT_64, FA_FLOATS_64, "%64, %65, %66, %67", "%68");
}
template <class In>
__device__ inline void wgmma_registers(float (&d)[96], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_RS("f16", 192, FA_TEXT_96, FA_FLOATS_96, "%96, %97, %98, %99", "%100");
  else
    FA_WGMMA_RS("bf16", 192, FA_TEXT_96, FA_FLOATS_96, "%96, %97, %98, %99", "%100");
}
template <class In>
__device__ inline void wgmma_registers(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (std::is_same_v<In, __half>)
    FA_WGMMA_RS("f16", 256, FA_TEXT_128, FA_FLOATS_128, "%128, %129, %130, %131", "%132");
  else
    FA_WGMMA_RS("bf16", 256, FA_TEXT_128, FA_FLOATS_128, "%128, %129, %130, %131", "%132");
}

// float8_e4m3fn. Both operands have contiguous k: the instruction has no other form.
#define FA_WGMMA_FLOAT8_SS(N, TEXT, FLOATS, A, B, P)                                          \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " P ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
               "k32.f32.e4m3.e4m3 {" TEXT "}, " A ", " B ", p, 1, 1;}"                        \
               : FLOATS                                                                       \
               : "l"(a), "l"(b), "r"(accumulate ? 1 : 0))
#define FA_WGMMA_FLOAT8_RS(N, TEXT, FLOATS, A, B)                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TEXT "}, {" A "}, " B \
               ", 1, 1, 1;"                                                                       \
               : FLOATS                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// d = a b, or d += a b: both from shared memory.
__device__ inline void wgmma_shared_float8(float (&d)[48], uint64_t a, uint64_t b, bool accumulate) {
  FA_WGMMA_FLOAT8_SS(96, FA_TEXT_48, FA_FLOATS_48, "%48", "%49", "%50");
}
__device__ inline void wgmma_shared_float8(float (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  FA_WGMMA_FLOAT8_SS(128, FA_TEXT_64, FA_FLOATS_64, "%64", "%65", "%66");
}

// d += a b: a from registers, b from shared memory.
__device__ inline void wgmma_registers_float8(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  FA_WGMMA_FLOAT8_RS(64, FA_TEXT_32, FA_FLOATS_32(0), "%32, %33, %34, %35", "%36");
}
__device__ inline void wgmma_registers_float8(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  FA_WGMMA_FLOAT8_RS(128, FA_TEXT_64, FA_FLOATS_64, "%64, %65, %66, %67", "%68");
}
__device__ inline void wgmma_registers_float8(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  FA_WGMMA_FLOAT8_RS(256, FA_TEXT_128, FA_FLOATS_128, "%128, %129, %130, %131", "%132");
}

#undef FA_WGMMA_SS
#undef FA_WGMMA_RS
#undef FA_WGMMA_FLOAT8_SS
#undef FA_WGMMA_FLOAT8_RS
#undef FA_TEXT_16
#undef FA_TEXT_32
#undef FA_TEXT_40
#undef FA_TEXT_48
#undef FA_TEXT_56
#undef FA_TEXT_64
#undef FA_TEXT_96
#undef FA_TEXT_128
#undef FA_FLOATS_8
#undef FA_FLOATS_16
#undef FA_FLOATS_32
#undef FA_FLOATS_40
#undef FA_FLOATS_48
#undef FA_FLOATS_56
#undef FA_FLOATS_64
#undef FA_FLOATS_96
#undef FA_FLOATS_128

}  // namespace flash_attn_ext::cuda::ptx
