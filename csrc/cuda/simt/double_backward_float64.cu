#include "double_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t double_backward_float64(const DoubleBackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_double_backward<double>(p, workspace, stream, row_terms_float64);
}

}  // namespace flash_attn_ext::cuda::simt
