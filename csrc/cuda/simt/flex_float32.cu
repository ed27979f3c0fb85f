#include "flex_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t flex_float32(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex<float>(p, workspace, stream);
}

cudaError_t flex_backward_float32(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex_backward<float>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
