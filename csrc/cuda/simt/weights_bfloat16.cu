#include "weights.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t weights_bfloat16(const WeightsParams& p, void* workspace, cudaStream_t stream) {
  return launch_weights<__nv_bfloat16>(p, workspace, row_terms_bfloat16, stream);
}

}  // namespace flash_attn_ext::cuda::simt
