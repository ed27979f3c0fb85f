#include "flex_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t flex_float16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex<__half>(p, workspace, stream);
}

cudaError_t flex_backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex_backward<__half>(p, workspace, stream);
}

cudaError_t flex_row_terms_float16(const BackwardParams& p, const FlexBackwardWorkspace<float>& w,
                                   cudaStream_t stream) {
  return launch_flex_row_terms<__half>(p, w, stream);
}

cudaError_t flex_gradients_float16(const BackwardParams& p, const FlexBackwardWorkspace<float>& w,
                                   cudaStream_t stream) {
  return launch_flex_gradients<__half>(p, w, stream);
}

}  // namespace flash_attn_ext::cuda::simt
