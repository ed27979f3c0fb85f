#include "double_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t double_backward_bfloat16(const DoubleBackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_double_backward<__nv_bfloat16>(p, workspace, stream, row_terms_bfloat16);
}

}  // namespace flash_attn_ext::cuda::simt
