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

// The backward's params and what they point to: tensors in a form that kernels read.
struct PackedBackward {
  AttentionInputs inputs;
  at::Tensor out, dout, dlse;
  at::Tensor dslopes_per_head;  // (B, H); defined if the slopes' gradient is wanted
  BackwardParams params;
};

// `result` is from empty_backward_result(); kernels write to it, all but the slopes' gradient.
PackedBackward pack_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                             const AttentionInputs& in, const at::Tensor& out, const at::Tensor& lse,
                             const AttentionOptions& options, const BackwardResult& result);

// After the kernels: the slopes' gradient in the slopes' own shape.
void store_slopes_gradient(const PackedBackward& packed, const AttentionInputs& in,
                           const BackwardResult& result);

}  // namespace flash_attn_ext
