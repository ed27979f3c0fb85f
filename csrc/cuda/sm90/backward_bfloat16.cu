#include "backward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward<__nv_bfloat16>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
