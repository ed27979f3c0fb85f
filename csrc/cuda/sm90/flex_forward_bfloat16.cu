#include "flex_forward.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t flex_forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  if (p.functions->score) return score_forward_bfloat16(p, workspace, stream);
  return launch_flex_forward<__nv_bfloat16, Form::kFunctions>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
