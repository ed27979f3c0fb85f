// From checked tensors to the plain structs of core/params.h. Device-independent.
#pragma once

#include "../core/params.h"
#include "ops.h"

namespace flash_attn_ext {

// Copies of those tensors that the kernels cannot read in place: a last dimension that is not contiguous;
// slopes in another type than the accumulators'. The params point into the result, which must outlive them.
AttentionTensors readable(const AttentionTensors& tensors);

// `out` and `lse` are written by the forward and read by the backward.
AttentionParams pack_attention(const AttentionTensors& tensors, const at::Tensor& out, const at::Tensor& lse,
                               const AttentionOptions& options);

uint64_t dropout_threshold(double dropout_p);

// The backward's params and what they point to: tensors in a form that kernels read.
struct PackedBackward {
  AttentionTensors tensors;
  at::Tensor out, lse, dout, dlse;
  at::Tensor dslopes_per_head;  // (B, H); defined if the slopes' gradient is wanted
  BackwardParams params;
};

// `result` is from empty_gradients(); kernels write to it, all but the slopes' gradient.
PackedBackward pack_backward(const AttentionBackwardTensors& given, const AttentionBackwardOptions& options,
                             const Gradients& result);

// After the kernels: the slopes' gradient in the slopes' own shape.
void store_slopes_gradient(const PackedBackward& packed, const Gradients& result);

}  // namespace flash_attn_ext
