// Converts between the structs of the operators and torch's lists of tensors, for the Autograd key.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "../dense/attention.h"

namespace flash_attn_ext {

using torch::autograd::variable_list;

inline at::Tensor tensor_or_undefined(const at::Tensor& t) { return t; }
inline at::Tensor tensor_or_undefined(const OptionalTensor& t) { return t.value_or(at::Tensor()); }

inline void load(const at::Tensor& saved, at::Tensor& t) { t = saved; }
inline void load(const at::Tensor& saved, OptionalTensor& t) { t = defined_or_none(saved); }

// `more`: the number of tensors that the caller will append.
template <class Struct>
variable_list list_of(const Struct& tensors, size_t more = 0) {
  variable_list list;
  list.reserve(kMembers<Struct> + more);
  tensors.with_members([&](const auto&... t) { (list.push_back(tensor_or_undefined(t)), ...); });
  return list;
}

template <class Struct>
Struct struct_of(const variable_list& list) {
  Struct tensors;
  auto next = list.begin();
  tensors.with_members([&](auto&... t) { (load(*next++, t), ...); });
  return tensors;
}

// The list of the computed gradients: autograd cannot wrap undefined outputs.
template <class Gradients>
variable_list wanted_of(const Gradients& gradients) {
  variable_list wanted;
  for (at::Tensor& grad : list_of(gradients))
    if (grad.defined()) wanted.push_back(std::move(grad));
  return wanted;
}

// The inverse of wanted_of(): a gradient without a flag is undefined.
template <class Gradients, size_t n>
Gradients gradients_from(const variable_list& wanted, const std::array<bool, n>& flags) {
  Gradients gradients;
  auto next = wanted.begin();
  auto flag = flags.begin();
  gradients.with_members([&](auto&... grad) { ((*flag++ ? void(grad = *next++) : void()), ...); });
  return gradients;
}

}  // namespace flash_attn_ext
