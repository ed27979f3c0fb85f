#include "flex_backward.cuh"

namespace flash_attn_ext::cuda::sm80 {

cudaError_t flex_backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex_backward<__half>(p, workspace, stream, simt::flex_row_terms_float16,
                                      simt::flex_gradients_float16);
}

}  // namespace flash_attn_ext::cuda::sm80
