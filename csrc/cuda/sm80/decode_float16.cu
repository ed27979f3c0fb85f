#include "decode.cuh"

namespace flash_attn_ext::cuda::sm80 {

cudaError_t decode_float16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return launch_decode<__half>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm80
