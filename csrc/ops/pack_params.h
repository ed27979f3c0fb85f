// From checked tensors to the plain structs of core/params.h. Device-independent.
#pragma once

#include "../core/params.h"
#include "ops.h"

namespace flash_attn_ext {

// Copies of those tensors that the kernels cannot read in place: a last dimension that is not contiguous;
// slopes and sinks in another type than the accumulators'. The params point into the result, which must outlive them.
AttentionTensors to_kernel_layout(const AttentionTensors& tensors);

// `out` and `lse` are written by the forward and read by the backward.
AttentionParams pack_attention(const AttentionTensors& tensors, const at::Tensor& out, const at::Tensor& lse,
                               const AttentionOptions& options);

int64_t pack_diagonal(const AttentionOptions& options);
DropoutParams pack_dropout(const at::Tensor& rng_state, double dropout_p);

// `t`, or a copy of it if its last dimension is not contiguous.
at::Tensor with_contiguous_rows(const at::Tensor& t);
DType pack_dtype(at::ScalarType dtype);
inline Offsets pack_offsets(const at::Tensor& t) {
  return {t.const_data_ptr(), t.scalar_type() == at::kLong};
}
inline Offsets pack_offsets(const OptionalTensor& t) { return t ? pack_offsets(*t) : Offsets{}; }

// The backward's params and what they point to: tensors in a form that kernels read.
struct PackedBackward {
  AttentionTensors tensors;
  at::Tensor out, lse, dout, dlse;
  at::Tensor dslopes_per_head, dsink_per_head;  // (B, H); defined if that gradient is wanted
  BackwardParams params;
};

// `result` is from empty_gradients(); kernels write to it, all but the gradients of slopes and sink, of which they write
// a part for each of `batch` batches (packed: sequences) and head.
PackedBackward pack_backward(const AttentionBackwardTensors& given, const AttentionBackwardOptions& options,
                             const Gradients& result, int64_t batch);

// After the kernels: the gradients of slopes and sink in their own shapes.
void store_per_head_gradients(const PackedBackward& packed, const Gradients& result);

// Forward mode's params, likewise.
struct PackedJvp {
  AttentionTensors tensors;
  InputTangents tangents;
  JvpParams params;
};
PackedJvp pack_jvp(const AttentionJvpTensors& given, const AttentionOptions& options,
                   const AttentionJvpResult& result);

// Double backward's params: `backward.params` is not used, all else of it is.
struct PackedDoubleBackward {
  PackedBackward backward;
  InputTangents tangents;
  at::Tensor tangent_out, tangent_lse;
  DoubleBackwardParams params;
};
PackedDoubleBackward pack_double_backward(const AttentionDoubleBackwardTensors& given,
                                          const AttentionBackwardOptions& options, const Gradients& result,
                                          int64_t batch);

}  // namespace flash_attn_ext
