#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward<__nv_bfloat16>(p, workspace, stream);
}

cudaError_t row_terms_bfloat16(const BackwardParams& p, const RowTerms<float>& rows, cudaStream_t stream) {
  return launch_row_terms<__nv_bfloat16>(p, rows, stream);
}

cudaError_t gradients_bfloat16(const BackwardParams& p, const BackwardWorkspace<float>& w,
                               cudaStream_t stream) {
  return launch_gradients<__nv_bfloat16>(p, w, stream);
}

}  // namespace flash_attn_ext::cuda::simt
