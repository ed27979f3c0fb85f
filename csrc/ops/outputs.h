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

inline AttentionResult empty_result(const AttentionTensors& in) {
  return {empty_in_order_of(in.query, in.value.sym_size(3)), empty_lse(in.query)};
}

inline AttentionJvpResult empty_jvp_result(const AttentionTensors& in) {
  auto [out, lse] = empty_result(in);
  auto [tangent_out, tangent_lse] = empty_result(in);
  return {out, lse, tangent_out, tangent_lse};
}

// Gradients that were not asked for stay undefined. Those of q, k and v keep their tensor's memory order, the others
// are contiguous.
inline Gradients empty_gradients(const AttentionTensors& in, const GradMask& wanted) {
  Gradients grads;
  auto allocate = [](at::Tensor& grad, bool want, const auto& t) {
    if (!want) return;
    if constexpr (std::is_same_v<decltype(t), const at::Tensor&>)
      grad = empty_in_order_of(t, t.sym_size(3));
    else
      grad = at::empty_symint(t->sym_sizes(), t->options());
  };
#define FA_ALLOCATE(name, ...) allocate(grads.name, wanted.name, in.name);
  FA_ATTENTION_DIFFERENTIABLE(FA_ALLOCATE)
#undef FA_ALLOCATE
  return grads;
}

}  // namespace flash_attn_ext
