#include "jvp.cuh"

namespace flash_attn_ext::cuda::sm80 {

cudaError_t jvp_bfloat16(const JvpParams& p, void*, cudaStream_t stream) {
  return launch_jvp<__nv_bfloat16>(p, stream);
}

}  // namespace flash_attn_ext::cuda::sm80
