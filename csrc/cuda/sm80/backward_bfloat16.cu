#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::sm80 {

cudaError_t backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward<__nv_bfloat16>(p, workspace, stream, simt::row_terms_bfloat16,
                                        simt::gradients_bfloat16);
}

}  // namespace flash_attn_ext::cuda::sm80
