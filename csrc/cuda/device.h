// Properties of the current device.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_attn_ext::cuda {

// The compute capability as 10 * major + minor; 0 if CUDA does not report it.
inline int compute_capability() {
  int device, major, minor;
  const bool found =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  return found ? 10 * major + minor : 0;
}

// The number of multiprocessors. If CUDA does not report it: the number of a large GPU.
inline int64_t multiprocessors() {
  int device, count;
  const bool found = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  return found ? count : 132;
}

}  // namespace flash_attn_ext::cuda
