// Which GPU a launch goes to.
#pragma once

#include <cuda_runtime_api.h>

namespace flash_attn_ext::cuda {

// Of the current device, as 10 * major + minor; 0 if it cannot be asked.
inline int compute_capability() {
  int device, major, minor;
  const bool known =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess;
  return known ? 10 * major + minor : 0;
}

// Of the current device; a large GPU's if it cannot be asked.
inline int64_t multiprocessors() {
  int device, count;
  const bool known = cudaGetDevice(&device) == cudaSuccess &&
                     cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess;
  return known ? count : 132;
}

}  // namespace flash_attn_ext::cuda
