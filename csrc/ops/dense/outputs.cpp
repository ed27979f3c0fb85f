// Allocates the results of attention: shapes, dtypes and memory order. The same for tensors without data.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_cpu_dispatch.h>

#include "attention.h"

namespace flash_attn_ext {
namespace {

// at::empty. On CPU it does not pass the dispatcher, which takes a third of the time. A tensor of another key has no memory
// on CPU: a fake tensor, for example.
at::Tensor empty(c10::SymIntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype) {
  constexpr c10::DispatchKeySet kOther({c10::DispatchKey::Python, c10::DispatchKey::Functionalize});
  const at::TensorOptions options = like.options().dtype(dtype);
  return options.device().is_cpu() && !like.key_set().has_any(kOther) ? at::cpu::empty_symint(sizes, options)
                                                                      : at::empty_symint(sizes, options);
}

// An empty tensor with the first three sizes of `like` and `last_dim`, in the memory order of `like`. Example: a (B, S,
// H, D) tensor is viewed as (B, H, S, D). Then the result can be viewed as (B, S, H, D) without a copy.
at::Tensor empty_in_order_of(const at::Tensor& like, const c10::SymInt& last_dim) {
  const auto b = like.sym_size(0), h = like.sym_size(1), s = like.sym_size(2);
  if (like.sym_stride(1) < like.sym_stride(2))
    return empty({b, s, h, last_dim}, like, like.scalar_type()).transpose(1, 2);
  return empty({b, h, s, last_dim}, like, like.scalar_type());
}

at::Tensor empty_out(const at::Tensor& query, const at::Tensor& value) {
  return empty_in_order_of(query, value.sym_size(3));
}

at::Tensor empty_lse(const at::Tensor& query) {
  return empty(query.sym_sizes().slice(0, 3), query, accumulate_type(query));
}

// The gradients of query, key and value have the memory order of their tensor. The other gradients are contiguous.
at::Tensor empty_gradient(const at::Tensor& t) { return empty_in_order_of(t, t.sym_size(3)); }
at::Tensor empty_gradient(const OptionalTensor& t) { return empty(t->sym_sizes(), *t, t->scalar_type()); }

template <class Tensors>
Gradients empty_gradients(const Tensors& in, const GradMask& wanted) {
  Gradients gradients;
#define FA_ALLOCATE(name, ...) \
  if (wanted.name) gradients.name = empty_gradient(in.name);
  FA_DIFFERENTIABLE(FA_ALLOCATE)
#undef FA_ALLOCATE
  return gradients;
}

}  // namespace

AttentionResult Attention::empty(const Tensors& in, const Options&) {
  return {empty_out(in.query, in.value), empty_lse(in.query)};
}

AttentionJvpResult AttentionJvp::empty(const Tensors& in, const Options&) {
  return {empty_out(in.query, in.value), empty_lse(in.query), empty_out(in.query, in.value),
          empty_lse(in.query)};
}

Gradients AttentionBackward::empty(const Tensors& in, const Options& options) {
  return empty_gradients(in, GradMask(options.grad_mask));
}

Gradients AttentionDoubleBackward::empty(const Tensors& in, const Options& options) {
  return empty_gradients(in, GradMask(options.grad_mask));
}

}  // namespace flash_attn_ext
