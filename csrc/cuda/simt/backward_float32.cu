#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t backward_float32(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward<float>(p, workspace, stream);
}

cudaError_t row_terms_float32(const BackwardParams& p, const RowTerms<float>& rows, cudaStream_t stream) {
  return launch_row_terms<float>(p, rows, stream);
}

}  // namespace flash_attn_ext::cuda::simt
