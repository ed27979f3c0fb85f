// Allocation of results: shapes, dtypes and memory order, the same for the Meta kernels and the real ones.
#pragma once

#include <ATen/ops/empty.h>

#include "ops.h"

namespace flash_attn_ext {

// An empty tensor of `like`'s first three sizes and `last_dim`, in `like`'s memory order: a (B, S, H, D)
// tensor seen as (B, H, S, D) gives a result that can be seen as (B, S, H, D) again without a copy.
inline at::Tensor empty_in_order_of(const at::Tensor& like, const c10::SymInt& last_dim) {
  const auto b = like.sym_size(0), h = like.sym_size(1), s = like.sym_size(2);
  if (like.sym_stride(1) < like.sym_stride(2))
    return at::empty_symint({b, s, h, last_dim}, like.options()).transpose(1, 2);
  return at::empty_symint({b, h, s, last_dim}, like.options());
}

inline at::Tensor empty_lse(const at::Tensor& query) {
  return at::empty_symint(query.sym_sizes().slice(0, 3), query.options().dtype(accumulate_type(query)));
}

inline ForwardResult empty_forward_result(const AttentionInputs& in) {
  return {empty_in_order_of(in.query, in.value.sym_size(3)), empty_lse(in.query)};
}

// Gradients that were not asked for stay undefined.
inline BackwardResult empty_backward_result(const AttentionInputs& in, const GradMask& wanted) {
  auto like = [](bool want, const at::Tensor& t) {
    return want ? empty_in_order_of(t, t.sym_size(3)) : at::Tensor();
  };
  auto contiguous_like = [](bool want, const OptionalTensor& t) {
    return want ? at::empty_symint(t->sym_sizes(), t->options()) : at::Tensor();
  };
  return {like(wanted.query, in.query), like(wanted.key, in.key), like(wanted.value, in.value),
          contiguous_like(wanted.attn_mask, in.attn_mask),
          contiguous_like(wanted.alibi_slopes, in.alibi_slopes)};
}

}  // namespace flash_attn_ext
