// Converts checked tensors to the params of core/params.h, for every device.
#pragma once

#include "attention.h"

namespace flash_attn_ext {

// Whether kernels read a tensor of this row as it is, and otherwise the copy that they read:
//   rows of D columns                 the last dimension is contiguous
//   offsets, lengths, tables, lse     contiguous
//   one element for each head         in the accumulators' type
bool is_in_kernel_layout(const TensorRule& rule, const at::Tensor& t, at::ScalarType accumulator);
at::Tensor to_kernel_layout(const TensorRule& rule, const at::Tensor& t, at::ScalarType accumulator);

template <class Tensors>
Tensors to_kernel_layout(const Tensors& given) {
  Tensors tensors = given;
  const at::ScalarType accumulator = accumulate_type(given.query);
  for_each_tensor(tensors, [&](const TensorRule& rule, auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (t && !is_in_kernel_layout(rule, *t, accumulator)) optional = to_kernel_layout(rule, *t, accumulator);
  });
  return tensors;
}

// Returns packed rows (T, H, D) as a dense view (B, H, T, D). The batch stride is 0: the kernels add the first row of each
// sequence.
inline at::Tensor dense_view(const at::Tensor& rows, int64_t sequences) {
  return rows.as_strided({sequences, rows.size(1), rows.size(0), rows.size(2)},
                         {0, rows.stride(1), rows.stride(0), rows.stride(2)});
}

// The functions below take dense tensors in the kernels' layout. Packed sequences and caches pass dense views.

AttentionParams pack_attention(const AttentionTensors& in, const at::Tensor& out, const at::Tensor& lse,
                               const AttentionOptions& options);
// `result` is from empty(). Kernels write to it, except the per-head gradients: for them kernels write one part for each
// batch (or packed sequence) and head to `per_head`.
void pack_backward(BackwardParams& p, const AttentionBackwardTensors& in,
                   const AttentionBackwardOptions& options, const Gradients& result,
                   const PerHead<at::Tensor>& per_head);
void pack_jvp(JvpParams& p, const AttentionJvpTensors& in, const AttentionOptions& options,
              const AttentionJvpResult& result);
void pack_double_backward(DoubleBackwardParams& p, const AttentionDoubleBackwardTensors& in,
                          const AttentionBackwardOptions& options, const Gradients& result,
                          const PerHead<at::Tensor>& per_head);

// Parts of the per-head gradients in `result`, (batch, heads) each; undefined if the gradient is not wanted.
PerHead<at::Tensor> empty_per_head(const Gradients& result, const at::Tensor& lse, int64_t batch,
                                   int64_t heads);
// Adds the parts to the gradients. Call it after the kernels.
void store_per_head_gradients(const PerHead<at::Tensor>& per_head, const Gradients& result);

// Zeros of the shape of `t`, in the memory of one row: for a cotangent or a tangent that the caller did not pass.
at::Tensor zeros_like_one_row(const at::Tensor& t);
template <class Tensors>
void fill_grad_out(Tensors& tensors) {
  if (!tensors.grad_out) tensors.grad_out = zeros_like_one_row(tensors.out);
}
template <class Tensors>
void fill_tangents(Tensors& tensors) {
  if (!tensors.tangent_query) tensors.tangent_query = zeros_like_one_row(tensors.query);
  if (!tensors.tangent_key) tensors.tangent_key = zeros_like_one_row(tensors.key);
  if (!tensors.tangent_value) tensors.tangent_value = zeros_like_one_row(tensors.value);
}

int64_t pack_diagonal(const AttentionOptions& options);
DropoutParams pack_dropout(const at::Tensor& rng_state, double dropout_p);
DType pack_dtype(at::ScalarType dtype);
inline Offsets pack_offsets(const at::Tensor& t) {
  return {t.const_data_ptr(), t.scalar_type() == at::kLong};
}
inline Offsets pack_offsets(const OptionalTensor& t) { return t ? pack_offsets(*t) : Offsets{}; }

}  // namespace flash_attn_ext
