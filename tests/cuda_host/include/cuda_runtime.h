// What the kernels use of CUDA's language and runtime, for a run on the host. Found instead of the toolkit's
// header because the host build's include path puts this folder first; the kernels' sources do not know.
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
#define __align__(n) __attribute__((aligned(n)))
// g++ refuses this attribute on a local variable: shared memory is the block's one dynamic array, or an
// error.
#define __shared__ __attribute__((section(".bss.cuda_shared")))

extern dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

namespace cuda_host {

// Where in the source a thread meets others.
struct Site {
  const char* what;
  const char* file;
  int line;
};
#define CUDA_HOST_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

// All threads of the block, or the lanes of a warp, meet at one site; then each goes on with its result.
uint64_t meet_block(Site site, uint64_t value);  // result: the bitwise or of all values
void meet_warp(Site site, unsigned mask);
uint64_t exchange_in_warp(Site site, unsigned mask, uint64_t value, int source_lane);  // no memory ordering

int lane();

cudaError_t run_grid(const cudaLaunchConfig_t& config, const void* kernel, void (*enter)(void*),
                     void* arguments, size_t argument_bytes);

template <class T>
T exchange(Site site, unsigned mask, T value, int source_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange_in_warp(site, mask, bits, source_lane);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace cuda_host

inline void __syncthreads(CUDA_HOST_SITE) { cuda_host::meet_block({"__syncthreads", file, line}, 0); }

inline int __syncthreads_or(int value, CUDA_HOST_SITE) {
  return cuda_host::meet_block({"__syncthreads_or", file, line}, value != 0) != 0;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, CUDA_HOST_SITE) {
  cuda_host::meet_warp({"__syncwarp", file, line}, mask);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CUDA_HOST_SITE) {
  const int source = cuda_host::lane() ^ lane_mask;
  const bool inside = source / width <= cuda_host::lane() / width;
  return cuda_host::exchange({"__shfl_xor_sync", file, line}, mask, value,
                             inside ? source : cuda_host::lane());
}

// Runs the kernel to its end: a host run has no streams.
template <class... Params, class... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
  using Arguments = std::tuple<void (*)(Params...), Params...>;
  Arguments arguments(kernel, args...);
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
