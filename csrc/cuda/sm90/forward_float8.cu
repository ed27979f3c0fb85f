#include "forward_float8.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t forward_float8(const AttentionParams& p, void*, cudaStream_t stream) {
  switch (padded_head_dim(p.sizes)) {
    case 64: return launch_float8<64>(p, stream);
    case 128: return launch_float8<128>(p, stream);
    default: return launch_float8<256>(p, stream);
  }
}

}  // namespace flash_attn_ext::cuda::sm90
