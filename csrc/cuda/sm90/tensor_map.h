// What TMA is told of a (B, heads, S, D) tensor: sizes, strides, the box that a copy brings, its swizzle.
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
  static TensorMapEncoder known = nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  if ((encode = known)) return cudaSuccess;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  encode = known = reinterpret_cast<TensorMapEncoder>(found);
  return cudaSuccess;
}

// A box is `rows` rows of one panel. Columns behind the last one arrive as zeros.
inline cudaError_t encode_tensor_map(CUtensorMap& map, const Tensor4& t, DType dtype, int64_t columns,
                                     int64_t length, int64_t heads, int64_t batch, uint32_t rows) {
  TensorMapEncoder encode;
  const cudaError_t status = find_encoder(encode);
  if (status != cudaSuccess) return status;

  constexpr int kRank = 4, kElementBytes = 2;
  // A dimension of one element is never stepped along; its stride still has to be one that the driver takes:
  // a multiple of 16 bytes, and no less than a row.
  const auto bytes = [columns](int64_t size, int64_t stride) {
    return static_cast<cuuint64_t>((size == 1 ? columns : stride) * kElementBytes);
  };
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t sizes[kRank] = {size(columns), size(length), size(heads), size(batch)};
  const cuuint64_t strides[kRank - 1] = {bytes(length, t.stride_s), bytes(heads, t.stride_h),
                                         bytes(batch, t.stride_b)};
  const cuuint32_t box[kRank] = {kPanelColumns, rows, 1, 1}, every[kRank] = {1, 1, 1, 1};
  const auto type =
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult encoded = encode(&map, type, kRank, t.data, sizes, strides, box, every,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return encoded == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The maps of a call's tensors. Packed sequences lie in one map, behind each other: what a box brings from behind the
// end of one of them are the next one's rows.
class TensorMaps {
 public:
  explicit TensorMaps(const AttentionParams& p) : p_(p) {}

  cudaError_t of_queries(CUtensorMap& map, const Tensor4& t, int64_t columns, uint32_t rows) const {
    return encode(map, t, columns, p_.sizes.seqlen_q, p_.varlen.total_q, p_.sizes.heads, rows);
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
