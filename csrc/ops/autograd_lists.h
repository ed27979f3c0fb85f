// Between the structs of ops.h and the lists of tensors that torch's autograd takes; for the files of the Autograd key.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "ops.h"

namespace flash_attn_ext {

using torch::autograd::variable_list;

inline at::Tensor tensor_or_undefined(const at::Tensor& t) { return t; }
inline at::Tensor tensor_or_undefined(const OptionalTensor& t) { return t.value_or(at::Tensor()); }

inline void load(const at::Tensor& saved, at::Tensor& t) { t = saved; }
inline void load(const at::Tensor& saved, OptionalTensor& t) { t = defined_or_none(saved); }

template <class Struct>
variable_list list_of(const Struct& tensors) {
  return std::apply([](const auto&... t) { return variable_list{tensor_or_undefined(t)...}; }, tensors.tie());
}

template <class Struct>
Struct struct_of(const variable_list& list) {
  Struct tensors;
  auto next = list.begin();
  std::apply([&](auto&... t) { (load(*next++, t), ...); }, tensors.tie());
  return tensors;
}

// The gradients that were computed: autograd cannot wrap undefined outputs.
inline variable_list wanted_of(const Gradients& gradients) {
  variable_list wanted;
  for (at::Tensor& grad : list_of(gradients))
    if (grad.defined()) wanted.push_back(std::move(grad));
  return wanted;
}

// The way back: each in its place, undefined where the flag is not set.
inline Gradients gradients_from(const variable_list& wanted, const GradFlags& flags) {
  Gradients gradients;
  auto next = wanted.begin();
  auto flag = flags.begin();
  std::apply([&](auto&... grad) { ((*flag++ ? void(grad = *next++) : void()), ...); }, gradients.tie());
  return gradients;
}

}  // namespace flash_attn_ext
