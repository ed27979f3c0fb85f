// Starts a kernel. Every launch calls launch(), which checks for errors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

namespace flash_attn_ext::cuda {

struct LaunchShape {
  int64_t tasks;       // blocks along x, at most 2^31 - 1, including batches and heads
  int64_t slices = 1;  // along y
  int64_t splits = 1;  // along z
  int threads = 256;
  size_t shared_bytes = 0;
  // Neighbouring blocks along x that run at the same time and reach each other's shared memory.
  int cluster = 1;
};

// The shared memory that each kernel may already use on each device.
inline std::mutex allowed_shared_bytes_mutex;
inline std::map<std::pair<const void*, int>, size_t> allowed_shared_bytes;

// Allows a kernel more dynamic shared memory than the default 48 KB. Calls the driver once for each kernel
// and device.
inline cudaError_t allow_shared_bytes(const void* kernel, size_t bytes) {
  constexpr size_t kWithoutAsking = 48 << 10;
  if (bytes <= kWithoutAsking) return cudaSuccess;
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  const std::lock_guard<std::mutex> lock(allowed_shared_bytes_mutex);
  size_t& has = allowed_shared_bytes[{kernel, device}];
  if (has >= bytes) return cudaSuccess;
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status == cudaSuccess) has = bytes;
  return status;
}

// For a shape without blocks, starts no kernel and returns no error.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                   const Args&... args) {
  constexpr int64_t kMaxTasks = std::numeric_limits<int32_t>::max(), kMaxOther = 65535;
  if (shape.tasks == 0 || shape.slices == 0 || shape.splits == 0) return cudaSuccess;
  if (shape.tasks > kMaxTasks || shape.slices > kMaxOther || shape.splits > kMaxOther)
    return cudaErrorInvalidConfiguration;
  const cudaError_t status = allow_shared_bytes(reinterpret_cast<const void*>(kernel), shape.shared_bytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.tasks, shape.slices, shape.splits);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster = {};
  if (shape.cluster > 1) {
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    config.attrs = &cluster;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, args...);
}

// Runs launches one after the other until one fails.
template <class... Steps>
cudaError_t in_order(const Steps&... steps) {
  cudaError_t status = cudaSuccess;
  ((status = status == cudaSuccess ? steps() : status), ...);
  return status;
}

}  // namespace flash_attn_ext::cuda
