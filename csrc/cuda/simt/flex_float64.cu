#include "flex_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t flex_float64(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex<double>(p, workspace, stream);
}

cudaError_t flex_backward_float64(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex_backward<double>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
