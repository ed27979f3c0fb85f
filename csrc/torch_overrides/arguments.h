// Which tensors the overrides take, and in which memory order they return results.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include "../ops/ops.h"

namespace flash_attn_ext::torch_overrides {

// autograd passes an undefined tensor where there is none.
inline OptionalTensor tensor_or_none(const c10::IValue& argument) {
  const auto t = argument.toOptional<at::Tensor>();
  return t && t->defined() ? t : OptionalTensor();
}

// Why a call with these (..., S, D) tensors is left to torch; nullptr if our kernels take it.
const char* why_not_tensors(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value);

// Why a mask of scaled_dot_product_attention, bool or added to the scores, is left to torch.
const char* why_not_mask(const OptionalTensor& mask, const at::Tensor& query);

// The mask with the four dimensions that our operator wants: leading ones are added.
OptionalTensor mask_as_4d(const OptionalTensor& mask);

// `t` with the strides of `model`, which has its shape; a copy only where they differ.
at::Tensor in_memory_order_of(const at::Tensor& t, const at::Tensor& model);

// (B, H, S, D) tensor or (B, H, S) one, laid out as (B, S, H, ...); a copy only where it is not.
at::Tensor sequence_before_heads(const at::Tensor& t);

}  // namespace flash_attn_ext::torch_overrides
