#include "forward.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t forward_bfloat16(const AttentionParams& p, void*, cudaStream_t stream) {
  return launch_forward<__nv_bfloat16>(p, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
