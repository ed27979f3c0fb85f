#include "forward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_forward<__half>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
