#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward<__half>(p, workspace, stream);
}

cudaError_t row_terms_float16(const BackwardParams& p, const RowTerms<float>& rows, cudaStream_t stream) {
  return launch_row_terms<__half>(p, rows, stream);
}

cudaError_t gradients_float16(const BackwardParams& p, const BackwardWorkspace<float>& w,
                              cudaStream_t stream) {
  return launch_gradients<__half>(p, w, stream);
}

}  // namespace flash_attn_ext::cuda::simt
