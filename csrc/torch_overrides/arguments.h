// Decides whether the overrides take a call, and converts masks and memory orders.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "../ops/dense/attention.h"

namespace flash_attn_ext::torch_overrides {

// Autograd passes an undefined tensor for None.
inline OptionalTensor tensor_or_none(const c10::IValue& argument) {
  const auto t = argument.toOptional<at::Tensor>();
  return t && t->defined() ? t : OptionalTensor();
}

// The reason why torch must run a call with these (..., S, D) tensors; nullptr: our kernels can run it.
const char* why_not_tensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

// The same for a mask of scaled_dot_product_attention, bool or float.
const char* why_not_mask(const OptionalTensor& mask, const at::Tensor& query);

// Views the mask with four dimensions, as our operator takes it: adds leading dimensions of size 1.
OptionalTensor mask_as_4d(const OptionalTensor& mask);

// Returns `t` with the strides of `model`, which has the same shape. Copies only if the strides differ.
at::Tensor in_memory_order_of(const at::Tensor& t, const at::Tensor& model);

// Returns a (B, H, S, D) or (B, H, S) tensor in the memory order (B, S, H, ...). Copies only if necessary.
at::Tensor sequence_before_heads(const at::Tensor& t);

// The gradients that torch's operators return.
inline GradFlags flags_of_query_key_value() {
  GradMask wanted;
  wanted.query = wanted.key = wanted.value = true;
  return wanted.flags();
}

}  // namespace flash_attn_ext::torch_overrides
