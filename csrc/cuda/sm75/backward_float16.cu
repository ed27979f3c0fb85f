#include "../sm80/launch_backward.cuh"
#include "sm75.h"

namespace flash_attn_ext::cuda::sm75 {

cudaError_t backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return sm80::launch_backward<__half, sm80::Turing>(p, workspace, stream, simt::row_terms_float16,
                                                     simt::gradients_float16);
}

}  // namespace flash_attn_ext::cuda::sm75
