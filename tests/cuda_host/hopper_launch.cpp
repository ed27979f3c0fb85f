// The driver calls of a launch on Hopper: tensor maps with their limits, and the GPU's properties.
#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "include/hopper_on_host.h"

namespace cuda_host {
namespace {

int compute_capability[2] = {8, 0};
int multiprocessors = 2;
int64_t lookups = 0;
// A new thread has no context. On a GPU a launch also makes one current, but a launcher must not rely on an earlier launch.
thread_local bool has_context = false;

}  // namespace

// By GPU: V100; T4; A10, L4, RTX 40 and 50; A100 and Orin; H100 and later.
size_t most_shared_bytes() {
  const int capability = 10 * compute_capability[0] + compute_capability[1];
  const auto is_one_of = [&](std::initializer_list<int> some) {
    return std::find(some.begin(), some.end(), capability) != some.end();
  };
  const int kilobytes = capability < 75                 ? 96
                        : capability < 80               ? 64
                        : is_one_of({86, 89, 120, 121}) ? 99
                        : is_one_of({80, 87})           ? 163
                                                        : 227;
  return static_cast<size_t>(kilobytes) << 10;
}

}  // namespace cuda_host

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                                const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                                const cuuint32_t* element_stride, CUtensorMapInterleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr int kMaxRank = CUtensorMap::kMaxRank;
  const int dimensions = static_cast<int>(rank);
  const uint32_t element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  if (dimensions < 3 || dimensions > kMaxRank) return CUDA_ERROR_INVALID_VALUE;
  bool valid = reinterpret_cast<uintptr_t>(data) % 16 == 0 && swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
               box[0] * element_bytes <= 128;
  map->rank = dimensions;
  map->element_bytes = static_cast<int>(element_bytes);
  map->data = static_cast<unsigned char*>(data);
  std::fill_n(map->size, kMaxRank, 1);
  std::fill_n(map->stride, kMaxRank - 1, 0);
  std::fill_n(map->box, kMaxRank, 1);
  for (int n = 0; n < dimensions; ++n) {
    map->size[n] = size[n];
    map->box[n] = box[n];
    valid = valid && size[n] > 0 && size[n] <= uint64_t{1} << 32 && box[n] > 0 && box[n] <= 256 &&
            element_stride[n] == 1;
  }
  for (int n = 0; n < dimensions - 1; ++n) {
    map->stride[n] = stride[n];
    valid =
        valid && stride[n] >= size[0] * element_bytes && stride[n] % 16 == 0 && stride[n] < uint64_t{1} << 40;
  }
  if (!cuda_host::has_context) return CUDA_ERROR_INVALID_CONTEXT;
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  ++cuda_host::lookups;
  const bool found = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = found ? reinterpret_cast<void*>(cuTensorMapEncodeTiled) : nullptr;
  *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) {
  cuda_host::has_context = true;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  constexpr int kReserved = 1 << 10;  // for each block
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = cuda_host::compute_capability[0]; break;
    case cudaDevAttrComputeCapabilityMinor: *value = cuda_host::compute_capability[1]; break;
    case cudaDevAttrMultiProcessorCount: *value = cuda_host::multiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(cuda_host::most_shared_bytes()) + kReserved;
      break;
  }
  return cudaSuccess;
}

extern "C" int64_t driver_lookups() { return cuda_host::lookups; }

extern "C" void set_multiprocessors(int count) { cuda_host::multiprocessors = count; }

extern "C" void set_compute_capability(int major, int minor) {
  cuda_host::compute_capability[0] = major;
  cuda_host::compute_capability[1] = minor;
}
