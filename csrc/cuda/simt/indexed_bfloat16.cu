#include "indexed_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t indexed_bfloat16(const IndexedParams& p, void* workspace, cudaStream_t stream) {
  return launch_indexed<__nv_bfloat16>(p, workspace, stream);
}

cudaError_t indexed_backward_bfloat16(const IndexedBackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_indexed_backward<__nv_bfloat16>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
