// The sm80 tier: fp16 and bf16 on tensor cores, by instructions of all GPUs from compute capability 8.0 on.
#pragma once

#include "../product_scale.h"
#include "../run.h"

namespace flash_attn_ext::cuda::sm80 {

// Whether a call has neither softcap, ALiBi, masks nor dropout, and a positive scale. Then only the band hides elements.
inline bool is_plain(const AttentionParams& p) {
  return is_positive(p.scale) && !has_softcap(p) && !p.alibi && !p.mask && !p.dropout;
}

// Why this tier cannot run the forward. Null: it can, on a GPU of compute capability 8.0 or later.
const char* why_not_forward(const AttentionParams& p);

// Whether the forward uses the decode kernel: for few queries, if the caller sets num_splits, and for keys in pages.
// Only the decode kernel reads pages.
bool is_decode(const AttentionParams& p);
size_t forward_workspace(const AttentionParams& p);

cudaError_t forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t decode_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t decode_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);

// The forward with functions of the user.
size_t flex_forward_workspace(const AttentionParams& p);
cudaError_t flex_forward_bfloat16(const AttentionParams& p, void* workspace, cudaStream_t stream);
cudaError_t flex_forward_float16(const AttentionParams& p, void* workspace, cudaStream_t stream);

// The same for the backward.
const char* why_not_backward(const BackwardParams& p);

size_t backward_workspace(const BackwardParams& p);
cudaError_t backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream);
cudaError_t backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream);

// The backward with functions of the user.
size_t flex_backward_workspace(const BackwardParams& p);
cudaError_t flex_backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream);
cudaError_t flex_backward_float16(const BackwardParams& p, void* workspace, cudaStream_t stream);

// The same for forward mode, which needs no workspace.
const char* why_not_jvp(const JvpParams& p);

cudaError_t jvp_bfloat16(const JvpParams& p, void* workspace, cudaStream_t stream);
cudaError_t jvp_float16(const JvpParams& p, void* workspace, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda::sm80
