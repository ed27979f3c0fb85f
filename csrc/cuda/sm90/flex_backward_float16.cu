#include "score_backward.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t flex_backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  if (p.functions->score)
    return launch_score_backward<__half>(p, workspace, stream, simt::flex_row_terms_float16);
  return launch_flex_backward<__half>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
