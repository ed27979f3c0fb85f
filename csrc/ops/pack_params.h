// From checked tensors to the plain structs of core/params.h. Device-independent.
#pragma once

#include "../core/params.h"
#include "ops.h"

namespace flash_attn_ext {

// Copies of those inputs that the kernels cannot read in place: a last dimension that is not contiguous;
// slopes in another type than the accumulators'. The params point into the result, which must outlive them.
AttentionInputs make_readable(const AttentionInputs& inputs);
at::Tensor make_readable(const at::Tensor& t);

// `out` and `lse` are written by the forward and read by the backward.
AttentionParams pack_attention(const AttentionInputs& inputs, const at::Tensor& out, const at::Tensor& lse,
                               const AttentionOptions& options);

Tensor4 pack_tensor4(const at::Tensor& t);  // an undefined tensor gives a null Tensor4
MaskGrad pack_mask_grad(const at::Tensor& dmask);
uint64_t dropout_threshold(double dropout_p);

}  // namespace flash_attn_ext
