#include "forward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t forward_float32(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_forward<float>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
