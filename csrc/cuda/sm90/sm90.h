// The tier for Hopper (H100, H200): wgmma, TMA, warp specialisation. Compiled and host-tested, not yet run on
// hardware.
#pragma once

#include "../run.h"

namespace flash_attn_ext::cuda::sm90 {

// Why another tier must run the forward; null: this one can, on a GPU of compute capability 9.0.
const char* why_not_forward(const AttentionParams& p);

cudaError_t forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda::sm90
