#include "backward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward<__half>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
