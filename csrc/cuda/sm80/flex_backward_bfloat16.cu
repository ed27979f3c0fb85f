#include "flex_backward.cuh"

namespace flash_attn_ext::cuda::sm80 {

cudaError_t flex_backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex_backward<__nv_bfloat16>(p, workspace, stream, simt::flex_row_terms_bfloat16,
                                             simt::flex_gradients_bfloat16);
}

}  // namespace flash_attn_ext::cuda::sm80
