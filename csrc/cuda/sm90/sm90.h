// The tier for Hopper (H100, H200): wgmma, TMA, warp specialisation.
#pragma once

#include "../run.h"

namespace flash_attn_ext::cuda::sm90 {

// Why this tier cannot run the forward. Null: it can, on a GPU of compute capability 9.0.
const char* why_not_forward(const AttentionParams& p);
size_t forward_workspace(const AttentionParams& p);

size_t flex_forward_workspace(const AttentionParams& p);  // of flex_forward_*: functions and block masks

// The same for the backward.
const char* why_not_backward(const BackwardParams& p);
size_t backward_workspace(const BackwardParams& p);
size_t flex_backward_workspace(const BackwardParams& p);  // of flex_backward_*

cudaError_t forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream);
// query, key and value in float8_e4m3fn (CacheParams::float8_products), out in bfloat16.
cudaError_t forward_float8(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t flex_forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t flex_forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);
// flex_forward_* passes calls with a score_mod to these.
cudaError_t score_forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t score_forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream);
cudaError_t backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream);
cudaError_t flex_backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream);
cudaError_t flex_backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda::sm90
