#include "jvp.cuh"
#include "simt.h"

namespace flash_attn_ext::cuda::simt {

cudaError_t jvp_float64(const JvpParams& p, void*, cudaStream_t stream) {
  return launch_jvp<double>(p, stream);
}

}  // namespace flash_attn_ext::cuda::simt
