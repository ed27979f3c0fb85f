#include "flex_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t flex_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex<__nv_bfloat16>(p, workspace, stream);
}

cudaError_t flex_backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex_backward<__nv_bfloat16>(p, workspace, stream);
}

cudaError_t flex_row_terms_bfloat16(const BackwardParams& p, const FlexBackwardWorkspace<float>& w,
                                    cudaStream_t stream) {
  return launch_flex_row_terms<__nv_bfloat16>(p, w, stream);
}

cudaError_t flex_gradients_bfloat16(const BackwardParams& p, const FlexBackwardWorkspace<float>& w,
                                    cudaStream_t stream) {
  return launch_flex_gradients<__nv_bfloat16>(p, w, stream);
}

}  // namespace flash_attn_ext::cuda::simt
