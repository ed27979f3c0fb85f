#include "indexed_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t indexed_float32(const IndexedParams& p, void* workspace, cudaStream_t stream) {
  return launch_indexed<float>(p, workspace, stream);
}

cudaError_t indexed_backward_float32(const IndexedBackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_indexed_backward<float>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
