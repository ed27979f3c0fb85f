#include "jvp.cuh"
#include "simt.h"

namespace flash_attn_ext::cuda::simt {

cudaError_t jvp_float16(const JvpParams& p, void*, cudaStream_t stream) {
  return launch_jvp<__half>(p, stream);
}

}  // namespace flash_attn_ext::cuda::simt
