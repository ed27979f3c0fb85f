// The parts of CUDA's language and runtime that the kernels use, for a run on the host. The host build's include path begins
// with this folder, so kernels include this file in place of the toolkit's header.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>

#include "cuda_runtime_api.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// g++ refuses this attribute on a local variable. So static shared memory is a compile error, and a block has only its
// dynamic array.
#define __shared__ __attribute__((section(".bss.cuda_shared")))

struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

extern dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the running fiber

namespace cuda_host {

// The line of the source where threads meet.
struct Site {
  const char* what;
  const char* file;
  int line;
};
// A part of the model and not of a kernel: no call before its accesses.
#define CUDA_HOST_UNWATCHED __attribute__((no_sanitize("thread")))
#define CUDA_HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// All threads of the block meet at one site; the result is the bitwise or of their values.
uint64_t meet_block(Site site, uint64_t value);
// The lanes of a warp meet.
void meet_warp(Site site, unsigned mask);
// The lanes of a warp meet. The last lane calls finish(pointer of each lane; null if the lane is not in the mask). This
// does not order memory.
void combine_lanes(Site site, unsigned mask, void* mine, void (*finish)(void* const* lanes));
// Ends the launch: a lane reads from a lane that is not in the mask.
[[noreturn]] void refuse_source_lane(Site site, int source);

int lane();
size_t most_shared_bytes();  // that a block may request on the GPU that the selector sees

cudaError_t run_grid(const cudaLaunchConfig_t& config, const void* kernel, void (*enter)(void*),
                     void* arguments, size_t argument_bytes);

// A kernel that tests/ptx has translated from PTX. It replaces the kernel that the host compiled. Its parameters have PTX's
// layout: each at a multiple of its alignment.
struct TranslatedKernel {
  void (*run)(const unsigned char* params) = nullptr;
  size_t bytes = 0;
  alignas(128) unsigned char params[4096];
};
// Null if there is none.
void (*find_translated(const void* kernel))(const unsigned char* params);

template <class T>
CUDA_HOST_UNWATCHED T take_from_lane(Site site, unsigned mask, T value, int source_lane) {
  struct Lane {
    T value, result;
    int source;
    bool found;
  };
  Lane mine{value, value, source_lane, false};
  combine_lanes(site, mask, &mine, [](void* const* lanes) CUDA_HOST_UNWATCHED {
    for (int n = 0; n < 32; ++n)
      if (auto* lane = static_cast<Lane*>(lanes[n]))
        if (const auto* source = static_cast<const Lane*>(lanes[lane->source]))
          lane->result = source->value, lane->found = true;
  });
  if (!mine.found) refuse_source_lane(site, source_lane);
  return mine.result;
}

}  // namespace cuda_host

// Ends the launch with an error.
void __trap();

inline void __syncthreads(CUDA_HOST_SITE) { cuda_host::meet_block({"__syncthreads", file, line}, 0); }

inline int __syncthreads_or(int value, CUDA_HOST_SITE) {
  return cuda_host::meet_block({"__syncthreads_or", file, line}, value != 0) != 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_HOST_SITE) {
  cuda_host::meet_warp({"__syncwarp", file, line}, mask);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, CUDA_HOST_SITE) {
  return cuda_host::take_from_lane({"__shfl_xor_sync", file, line}, mask, value,
                                   cuda_host::lane() ^ lane_mask);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source_lane, CUDA_HOST_SITE) {
  return cuda_host::take_from_lane({"__shfl_sync", file, line}, mask, value, source_lane % 32);
}

// Bit n is the predicate of lane n.
CUDA_HOST_UNWATCHED inline uint32_t __ballot_sync(unsigned mask, int predicate, CUDA_HOST_SITE) {
  struct Lane {
    bool predicate;
    uint32_t result;
  };
  Lane mine{predicate != 0, 0};
  cuda_host::combine_lanes({"__ballot_sync", file, line}, mask, &mine,
                           [](void* const* lanes) CUDA_HOST_UNWATCHED {
                             uint32_t result = 0;
                             for (int n = 0; n < 32; ++n)
                               if (const auto* lane = static_cast<const Lane*>(lanes[n]))
                                 result |= uint32_t{lane->predicate} << n;
                             for (int n = 0; n < 32; ++n)
                               if (auto* lane = static_cast<Lane*>(lanes[n])) lane->result = result;
                           });
  return mine.result;
}
float atomicAdd(float* address, float x);
unsigned long long atomicAdd(unsigned long long* address, unsigned long long x);
unsigned long long atomicMax(unsigned long long* address, unsigned long long x);
unsigned long long atomicOr(unsigned long long* address, unsigned long long x);
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }

// Rounds the product before an addition. g++ does the same, because FMA is off.
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }

inline float __uint_as_float(uint32_t x) {
  float result;
  std::memcpy(&result, &x, sizeof(result));
  return result;
}

// Runs the kernel to its end. A host run has no streams.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  using Arguments = std::tuple<void (*)(Params...), Params...>;
  Arguments arguments(kernel, args...);
  cuda_host::TranslatedKernel translated;
  translated.run = cuda_host::find_translated(reinterpret_cast<const void*>(kernel));
  if (translated.run) {
    const auto append = [&](const auto& param) {
      translated.bytes = (translated.bytes + alignof(decltype(param)) - 1) / alignof(decltype(param)) *
                         alignof(decltype(param));
      std::memcpy(translated.params + translated.bytes, &param, sizeof(param));
      translated.bytes += sizeof(param);
    };
    std::apply([&](auto, const auto&... params) { (append(params), ...); }, arguments);
    const auto enter = [](void* pointer) {
      const auto* chosen = static_cast<cuda_host::TranslatedKernel*>(pointer);
      chosen->run(chosen->params);
    };
    return cuda_host::run_grid(*config, reinterpret_cast<const void*>(kernel), enter, &translated,
                               sizeof(translated));
  }
  const auto enter = [](void* pointer) {
    std::apply([](auto run, auto&... params) { run(params...); }, *static_cast<Arguments*>(pointer));
  };
  return cuda_host::run_grid(*config, reinterpret_cast<const void*>(kernel), enter, &arguments,
                             sizeof(arguments));
}

template <class... Params>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Params...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}
