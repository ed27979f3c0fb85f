#include "weights.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t weights_float64(const WeightsParams& p, void* workspace, cudaStream_t stream) {
  return launch_weights<double>(p, workspace, row_terms_float64, stream);
}

}  // namespace flash_attn_ext::cuda::simt
