#include "double_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t double_backward_float32(const DoubleBackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_double_backward<float>(p, workspace, stream, row_terms_float32);
}

}  // namespace flash_attn_ext::cuda::simt
