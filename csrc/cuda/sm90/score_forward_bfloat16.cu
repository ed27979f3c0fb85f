#include "flex_forward.cuh"
#include "score_function.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t score_forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex_forward<__nv_bfloat16, Form::kScores>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
