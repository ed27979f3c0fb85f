#include "../sm80/forward.cuh"
#include "sm75.h"

namespace flash_attn_ext::cuda::sm75 {

cudaError_t forward_float16(const AttentionParams& p, void*, cudaStream_t stream) {
  return sm80::launch_forward<__half, sm80::Turing>(p, stream);
}

}  // namespace flash_attn_ext::cuda::sm75
