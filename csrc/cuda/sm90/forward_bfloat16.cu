#include "forward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_forward<__nv_bfloat16>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
