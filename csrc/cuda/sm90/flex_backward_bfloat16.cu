#include "score_backward.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t flex_backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  if (p.functions->score)
    return launch_score_backward<__nv_bfloat16>(p, workspace, stream, simt::flex_row_terms_bfloat16);
  return launch_flex_backward<__nv_bfloat16>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
