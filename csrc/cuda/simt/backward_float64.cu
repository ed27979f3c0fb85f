#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t backward_float64(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward<double>(p, workspace, stream);
}

cudaError_t row_terms_float64(const BackwardParams& p, const RowTerms<double>& rows, cudaStream_t stream) {
  return launch_row_terms<double>(p, rows, stream);
}

}  // namespace flash_attn_ext::cuda::simt
