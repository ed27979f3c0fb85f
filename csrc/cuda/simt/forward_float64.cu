#include "forward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t forward_float64(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_forward<double>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
