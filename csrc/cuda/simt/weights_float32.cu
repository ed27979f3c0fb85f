#include "weights.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t weights_float32(const WeightsParams& p, void* workspace, cudaStream_t stream) {
  return launch_weights<float>(p, workspace, row_terms_float32, stream);
}

}  // namespace flash_attn_ext::cuda::simt
