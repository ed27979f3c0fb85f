// Properties of the current device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared_bytes.h"

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

// The shared memory of a multiprocessor in bytes. If CUDA does not report it: the least of all GPUs from 8.0 on.
inline size_t shared_bytes_of_multiprocessor() {
  int device, bytes;
  const bool found =
      cudaGetDevice(&device) == cudaSuccess &&
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device) == cudaSuccess;
  return found ? bytes : kMaxSharedBytes + kReservedSharedBytes;
}

}  // namespace flash_attn_ext::cuda
