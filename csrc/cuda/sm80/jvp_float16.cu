#include "jvp.cuh"

namespace flash_attn_ext::cuda::sm80 {

cudaError_t jvp_float16(const JvpParams& p, void*, cudaStream_t stream) {
  return launch_jvp<__half>(p, stream);
}

}  // namespace flash_attn_ext::cuda::sm80
