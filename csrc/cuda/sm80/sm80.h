// The sm80 tier: fp16 and bf16 on tensor cores, by instructions that every GPU from compute capability 8.0 on
// has.
#pragma once

#include "../run.h"

namespace flash_attn_ext::cuda::sm80 {

// Whether the forward takes this call; the simt tier takes the others.
bool takes_forward(const AttentionParams& p);

cudaError_t forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda::sm80
