#include "jvp.cuh"
#include "simt.h"

namespace flash_attn_ext::cuda::simt {

cudaError_t jvp_float32(const JvpParams& p, void*, cudaStream_t stream) {
  return launch_jvp<float>(p, stream);
}

}  // namespace flash_attn_ext::cuda::simt
