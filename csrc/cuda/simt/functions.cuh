// Functions of the user on the GPU, for every tier: copies them to the GPU, and evaluates whether they show an element.
#pragma once

#include "../launch.h"
#include "program.cuh"

namespace flash_attn_ext::cuda::simt {

// Writes the functions to the GPU's memory.
static __global__ void store_functions_kernel(const __grid_constant__ DeviceFunctions from,
                                              DeviceFunctions* to) {
  constexpr int kWords = sizeof(DeviceFunctions) / sizeof(int64_t);
  for (int n = threadIdx.x; n < kWords; n += blockDim.x)
    reinterpret_cast<int64_t*>(to)[n] = reinterpret_cast<const int64_t*>(&from)[n];
}

inline cudaError_t launch_store_functions(const AttentionParams& p, DeviceFunctions* to, cudaStream_t stream,
                                          const CapturedSums& sums = {}) {
  return launch(store_functions_kernel, LaunchShape{1, 1, 1, kThreads}, stream,
                device_functions(*p.functions, p.dtype, sums), to);
}

// Whether the block mask and the mask function show an element. `queries_before`: BlockStates::queries_before, or 0 if the
// call cannot be a cache.
template <class T>
__device__ bool is_shown(const DeviceFunctions& functions, ProgramPoint<T> point, int64_t queries_before) {
  if (functions.blocks) {
    const uint8_t state = functions.blocks.at(point.b, point.h, queries_before + point.query, point.key);
    if (state != BlockStates::kPartial) return state == BlockStates::kFull;
  }
  return !functions.mask || run_program(&functions, functions.mask, point) != 0;
}

// Returns the gradient of the score before the user's function, at one element. kAdds: adds the element to the
// gradients of captured elements. A gradient of 0 stays 0, for every derivative of the function.
template <bool kAdds>
__device__ float old_gradient(const DeviceFunctions* functions, const ProgramPoint<float>& point) {
  if (point.gradient == 0) return 0;
  if (kAdds && functions->captured_gradient) run_program(functions, functions->captured_gradient, point);
  return functions->gradient ? number_of<float>(run_program(functions, functions->gradient, point))
                             : point.gradient;
}

}  // namespace flash_attn_ext::cuda::simt
