#include "flex_forward.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t flex_forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_flex_forward<__half>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
