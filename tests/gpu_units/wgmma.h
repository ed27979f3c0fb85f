// wgmma of every shape and major-ness that is tried here, by name. In csrc/ a kernel has those that it needs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace gpu_units {

// 64 x kN (+)= 64 x 16 times 16 x kN. kTransA, kTransB: 0 if k is contiguous in shared memory, 1 if m or n
// is.
template <int kN>
struct Wgmma;

// The accumulator's registers as operands: text, and constraints.
#define GPU_UNITS_TEXT_32                                                                                   \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22" \
  ", %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define GPU_UNITS_TEXT_40 GPU_UNITS_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define GPU_UNITS_TEXT_48 GPU_UNITS_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define GPU_UNITS_TEXT_64 \
  GPU_UNITS_TEXT_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define GPU_UNITS_TEXT_96                                                                                  \
  GPU_UNITS_TEXT_64                                                                                        \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, " \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define GPU_UNITS_TEXT_128                                                                             \
  GPU_UNITS_TEXT_96                                                                                    \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112" \
  ", %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GPU_UNITS_8(n)                                                                        \
  "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3]), "+f"(d[n + 4]), "+f"(d[n + 5]), \
      "+f"(d[n + 6]), "+f"(d[n + 7])
#define GPU_UNITS_32(n) GPU_UNITS_8(n), GPU_UNITS_8(n + 8), GPU_UNITS_8(n + 16), GPU_UNITS_8(n + 24)
#define GPU_UNITS_FLOATS_32 GPU_UNITS_32(0)
#define GPU_UNITS_FLOATS_40 GPU_UNITS_32(0), GPU_UNITS_8(32)
#define GPU_UNITS_FLOATS_48 GPU_UNITS_FLOATS_40, GPU_UNITS_8(40)
#define GPU_UNITS_FLOATS_64 GPU_UNITS_32(0), GPU_UNITS_32(32)
#define GPU_UNITS_FLOATS_96 GPU_UNITS_FLOATS_64, GPU_UNITS_32(64)
#define GPU_UNITS_FLOATS_128 GPU_UNITS_FLOATS_96, GPU_UNITS_32(96)

// I0 to I6 are the numbers of the operands behind the accumulator's.
#define GPU_UNITS_SHARED(TYPE, N, TEXT, FLOATS, I0, I1, I2, I3, I4)                              \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " I2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N   \
               "k16.f32." TYPE "." TYPE " {" TEXT "}, " I0 ", " I1 ", p, 1, 1, " I3 ", " I4 ";}" \
               : FLOATS                                                                          \
               : "l"(a), "l"(b), "r"(accumulate ? 1 : 0), "n"(kTransA), "n"(kTransB))
#define GPU_UNITS_REGISTERS(TYPE, N, TEXT, FLOATS, I0, I1, I2, I3, I4, I5, I6)                 \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " I5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N \
               "k16.f32." TYPE "." TYPE " {" TEXT "}, {" I0 ", " I1 ", " I2 ", " I3 "}, " I4   \
               ", p, 1, 1, " I6 ";}"                                                           \
               : FLOATS                                                                        \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate ? 1 : 0), "n"(kTransB))
#define GPU_UNITS_WGMMA(N, COUNT, I0, I1, I2, I3, I4, I5, I6)                                                \
  template <>                                                                                                \
  struct Wgmma<N> {                                                                                          \
    template <class In, int kTransA, int kTransB>                                                            \
    __device__ static void shared(float (&d)[COUNT], uint64_t a, uint64_t b, bool accumulate) {              \
      if constexpr (std::is_same_v<In, __half>)                                                              \
        GPU_UNITS_SHARED("f16", N, GPU_UNITS_TEXT_##COUNT, GPU_UNITS_FLOATS_##COUNT, I0, I1, I2, I3, I4);    \
      else                                                                                                   \
        GPU_UNITS_SHARED("bf16", N, GPU_UNITS_TEXT_##COUNT, GPU_UNITS_FLOATS_##COUNT, I0, I1, I2, I3, I4);   \
    }                                                                                                        \
    template <class In, int kTransB>                                                                         \
    __device__ static void registers(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b,                  \
                                     bool accumulate) {                                                      \
      if constexpr (std::is_same_v<In, __half>)                                                              \
        GPU_UNITS_REGISTERS("f16", N, GPU_UNITS_TEXT_##COUNT, GPU_UNITS_FLOATS_##COUNT, I0, I1, I2, I3, I4,  \
                            I5, I6);                                                                         \
      else                                                                                                   \
        GPU_UNITS_REGISTERS("bf16", N, GPU_UNITS_TEXT_##COUNT, GPU_UNITS_FLOATS_##COUNT, I0, I1, I2, I3, I4, \
                            I5, I6);                                                                         \
    }                                                                                                        \
  }

GPU_UNITS_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38");
GPU_UNITS_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46");
GPU_UNITS_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54");
GPU_UNITS_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70");
GPU_UNITS_WGMMA(192, 96, "%96", "%97", "%98", "%99", "%100", "%101", "%102");
GPU_UNITS_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134");

}  // namespace gpu_units
