#include "../sm80/decode.cuh"
#include "sm75.h"

namespace flash_attn_ext::cuda::sm75 {

cudaError_t decode_float16(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  return sm80::launch_decode<__half, sm80::Turing>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm75
