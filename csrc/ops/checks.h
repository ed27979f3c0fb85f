// Every check of an operator's arguments. Each device's kernel and the Meta kernel call these first, so that
// a bad call fails with the same words everywhere, also while it is traced. Messages name the argument, what
// was got and what is allowed.
#pragma once

#include "ops.h"

namespace flash_attn_ext {

constexpr int64_t kMaxHeadDim = 512;

// Throw TypeError (dtype, device) or ValueError (everything else).
void check_attention(const AttentionInputs& inputs, const AttentionOptions& options);
void check_attention_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                              const AttentionInputs& inputs, const at::Tensor& out, const at::Tensor& lse,
                              const AttentionOptions& options, const GradMask& grad_mask);
void check_dropout_mask(const at::Tensor& rng_state, c10::ArrayRef<c10::SymInt> sizes, double dropout_p);

}  // namespace flash_attn_ext
