#include "select.h"

#include "device.h"
#include "simt/simt.h"
#include "sm80/sm80.h"
#include "sm90/sm90.h"

namespace flash_attn_ext::cuda {

// simt takes every dtype, head dimension and option of the contract, on any GPU; sm80 and, on Hopper, sm90
// are faster where they can be.

Selection<AttentionParams> select_forward(const AttentionParams& p) {
  if (p.decode.has_unified_max) return {0, nullptr, "unified_max is for the CPU only so far"};
  if (compute_capability() == 90 && sm90::why_not_forward(p) == nullptr)
    return {0, p.dtype == DType::kFloat16 ? sm90::forward_float16 : sm90::forward_bfloat16};
  if (sm80::why_not_forward(p) == nullptr)
    return {0, p.dtype == DType::kFloat16 ? sm80::forward_float16 : sm80::forward_bfloat16};
  const size_t bytes = simt::forward_workspace(p);
  switch (p.dtype) {
    case DType::kFloat32: return {bytes, simt::forward_float32};
    case DType::kFloat64: return {bytes, simt::forward_float64};
    case DType::kBFloat16: return {bytes, simt::forward_bfloat16};
    case DType::kFloat16: return {bytes, simt::forward_float16};
    case DType::kBool: break;
  }
  return {0, nullptr, "query's dtype has no kernel"};
}

Selection<BackwardParams> select_backward(const BackwardParams& p) {
  if (compute_capability() == 90 && sm90::why_not_backward(p) == nullptr)
    return {sm90::backward_workspace(p),
            p.dtype == DType::kFloat16 ? sm90::backward_float16 : sm90::backward_bfloat16};
  const size_t bytes = simt::backward_workspace(p);
  switch (p.dtype) {
    case DType::kFloat32: return {bytes, simt::backward_float32};
    case DType::kFloat64: return {bytes, simt::backward_float64};
    case DType::kBFloat16: return {bytes, simt::backward_bfloat16};
    case DType::kFloat16: return {bytes, simt::backward_float16};
    case DType::kBool: break;
  }
  return {0, nullptr, "query's dtype has no kernel"};
}

}  // namespace flash_attn_ext::cuda
