// TMA's descriptor of a (B, heads, S, D) tensor: sizes, strides, the box of a copy, the swizzle.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <mutex>

#include "../../core/params.h"
#include "panels.h"

namespace flash_attn_ext::cuda::sm90 {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, looked up once in a process: libcuda is not linked.
inline cudaError_t find_encoder(TensorMapEncoder& encode) {
  static std::mutex mutex;
  static TensorMapEncoder cached = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if ((encode = cached)) return cudaSuccess;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encode = cached = reinterpret_cast<TensorMapEncoder>(found);
  return cudaSuccess;
}

// Makes the device's context current in this thread, once. The encoder needs a current context. A thread of torch's
// autograd engine may have none: torch does not set a thread's device if it is the default device.
inline cudaError_t set_context_of_thread() {
  static thread_local bool done = false;
  if (done) return cudaSuccess;
  int device;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  done = status == cudaSuccess;
  return status;
}

// A dimension of a tensor, other than its columns, and the steps of a box along it.
struct MapDimension {
  int64_t size, stride;
  uint32_t box = 1;
};

struct MapElement {
  CUtensorMapDataType type;
  int bytes;
};
inline MapElement map_element(DType dtype) {
  return {dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2};
}
constexpr MapElement kFloat8Element{CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};

// A box has rows of one panel. Columns after the last column and rows outside of the tensor are zeros.
template <int kDimensions>
cudaError_t encode_tensor_map(CUtensorMap& map, void* data, MapElement element, int64_t columns,
                              const MapDimension (&dimensions)[kDimensions]) {
  TensorMapEncoder encode;
  cudaError_t status = find_encoder(encode);
  if (status == cudaSuccess) status = set_context_of_thread();
  if (status != cudaSuccess) return status;

  constexpr int kRank = 1 + kDimensions;
  cuuint64_t sizes[kRank] = {static_cast<cuuint64_t>(columns)}, strides[kDimensions];
  cuuint32_t box[kRank] = {static_cast<cuuint32_t>(kPanelRowBytes / element.bytes)}, every[kRank] = {1};
  for (int n = 0; n < kDimensions; ++n) {
    const MapDimension& d = dimensions[n];
    sizes[n + 1] = static_cast<cuuint64_t>(d.size);
    // Copies do not step along a dimension of one element. But the driver checks its stride: a multiple of 16 bytes,
    // and not less than a row.
    strides[n] = static_cast<cuuint64_t>((d.size == 1 ? columns : d.stride) * element.bytes);
    box[n + 1] = d.box;
    every[n + 1] = 1;
  }
  const CUresult encoded = encode(&map, element.type, kRank, data, sizes, strides, box, every,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return static_cast<cudaError_t>(encoded);  // an error has the same number in the driver and the runtime
}

// A box has `rows` rows of a head.
inline cudaError_t encode_tensor_map(CUtensorMap& map, const Tensor4& t, DType dtype, int64_t columns,
                                     int64_t length, int64_t heads, int64_t batch, uint32_t rows) {
  return encode_tensor_map(map, t.data, map_element(dtype), columns,
                           {{length, t.stride_s, rows}, {heads, t.stride_h}, {batch, t.stride_b}});
}

// The descriptors of a call's tensors. Packed sequences share one descriptor, so a box may contain rows of the next
// sequence.
class TensorMaps {
 public:
  explicit TensorMaps(const AttentionParams& p) : p_(p) {}

  cudaError_t of_queries(CUtensorMap& map, const Tensor4& t, int64_t columns, uint32_t rows) const {
    return encode(map, t, columns, p_.sizes.seqlen_q, p_.varlen.total_q, p_.sizes.heads, rows);
  }
  // A box has `rows` rows of each of `heads` heads that share a key head, query by query.
  cudaError_t of_groups(CUtensorMap& map, const Tensor4& t, int64_t columns, uint32_t rows,
                        uint32_t heads) const {
    const Sizes& z = p_.sizes;
    const int64_t group = z.heads / z.heads_kv, length = p_.varlen ? p_.varlen.total_q : z.seqlen_q;
    return encode_tensor_map(map, t.data, map_element(p_.dtype), columns,
                             {{group, t.stride_h, heads},
                              {length, t.stride_s, rows},
                              {z.heads_kv, group * t.stride_h},
                              {p_.varlen ? 1 : z.batch, t.stride_b}});
  }
  cudaError_t of_keys(CUtensorMap& map, const Tensor4& t, int64_t columns, uint32_t rows) const {
    return encode(map, t, columns, p_.sizes.seqlen_k, p_.varlen.total_k, p_.sizes.heads_kv, rows);
  }

 private:
  cudaError_t encode(CUtensorMap& map, const Tensor4& t, int64_t columns, int64_t length, int64_t total,
                     int64_t heads, uint32_t rows) const {
    return p_.varlen ? encode_tensor_map(map, t, p_.dtype, columns, total, heads, 1, rows)
                     : encode_tensor_map(map, t, p_.dtype, columns, length, heads, p_.sizes.batch, rows);
  }
  const AttentionParams& p_;
};

}  // namespace flash_attn_ext::cuda::sm90
