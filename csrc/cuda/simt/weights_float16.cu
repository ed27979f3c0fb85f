#include "weights.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t weights_float16(const WeightsParams& p, void* workspace, cudaStream_t stream) {
  return launch_weights<__half>(p, workspace, row_terms_float16, stream);
}

}  // namespace flash_attn_ext::cuda::simt
