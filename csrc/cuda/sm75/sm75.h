// The sm75 tier: fp16 on the tensor cores of compute capability 7.5 (T4, RTX 20). Its kernels are the sources of sm80
// with the trait Turing (sm80/gpu.h): tiles for 64 KB of shared memory, copies through registers.
#pragma once

#include "../run.h"

namespace flash_attn_ext::cuda::sm75 {

// Why this tier cannot run the forward. Null: it can, on a GPU of compute capability 7.5.
const char* why_not_forward(const AttentionParams& p);

size_t forward_workspace(const AttentionParams& p);
cudaError_t forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t decode_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);

// The same for the backward.
const char* why_not_backward(const BackwardParams& p);

size_t backward_workspace(const BackwardParams& p);
cudaError_t backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda::sm75
