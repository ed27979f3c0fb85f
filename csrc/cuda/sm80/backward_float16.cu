#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::sm80 {

cudaError_t backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward<__half>(p, workspace, stream, simt::row_terms_float16, simt::gradients_float16);
}

}  // namespace flash_attn_ext::cuda::sm80
