// Helpers of the autograd functions of a family. They have the modes of differentiation of a call, and the calls B, J
// and H of the table in derivatives.h.
#pragma once

#include <ATen/ops/add.h>

#include <algorithm>

#include "record.h"

namespace flash_attn_ext {

// The modes of differentiation that a call needs. A call that needs no mode runs without a Function: its set-up takes
// longer than attention of a few rows.
struct Differentiated {
  bool reverse = false, forward = false;
};

template <class Tensors>
Differentiated how_differentiated(const Tensors& tensors) {
  Differentiated how;
  for_each_present_tensor(tensors, [&](const TensorRule&, const at::Tensor& t) {
    how.reverse |= at::GradMode::is_enabled() && t.requires_grad();
    how.forward |= t._fw_grad(/*level=*/0).defined();
  });
  return how;
}

// Calls an operator. If no derivative is needed, the Autograd key would only pass the call on, in the time of a small attention.
template <class Op>
typename Op::Result call_with_derivatives(const typename Op::Tensors& tensors,
                                          const typename Op::Options& options) {
  const Differentiated how = how_differentiated(tensors);
  if (how.reverse || how.forward) return call<Op>(tensors, options);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call<Op>(tensors, options);
}

// The tensors without their forward-mode tangents.
template <class Tensors>
Tensors primals_of(const Tensors& tensors) {
  Tensors primals = tensors;
  for_each_tensor(primals, [](const TensorRule&, auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (t && t->_fw_grad(/*level=*/0).defined()) optional = t->_fw_primal(/*level=*/0);
  });
  return primals;
}

inline OptionalTensor tangent_of(const OptionalTensor& t) {
  if (!t || !t->defined()) return std::nullopt;
  const at::Tensor& tangent = t->_fw_grad(/*level=*/0);
  return tangent.defined() && !tangent._is_zerotensor() ? OptionalTensor(tangent) : std::nullopt;
}

// The tangents of the first tensors, which are differentiable.
template <class Tangents, class Tensors>
Tangents tangents_of(const Tensors& tensors) {
  variable_list list;
  for_each_tensor(tensors, [&](const TensorRule&, const auto& t) {
    if (list.size() < Tangents::kCount) list.push_back(tensor_or_undefined(tangent_of(t)));
  });
  return struct_of<Tangents>(list);
}

template <class Tangents, class Gradients>
Tangents as_tangents(const Gradients& gradients) {
  return struct_of<Tangents>(list_of(gradients));
}

inline void set_tangent(const at::Tensor& t, const at::Tensor& tangent) {
  if (t.defined() && tangent.defined()) t._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}

template <class Tangents>
bool any_defined(const Tangents& tangents) {
  return tangents.with_members([](const auto&... t) { return ((t && t->defined()) || ...); });
}

// a += b, where undefined is zero.
inline void add(at::Tensor& a, const at::Tensor& b) {
  if (b.defined()) a = a.defined() ? at::add(a, b) : b;
}
template <class Gradients>
void add_gradients(Gradients& a, const Gradients& b) {
  variable_list sum = list_of(a);
  size_t n = 0;
  for (const at::Tensor& t : list_of(b)) add(sum[n++], t);
  a = struct_of<Gradients>(sum);
}

struct Cotangents {
  at::Tensor out, lse;
  bool any() const { return out.defined() || lse.defined(); }
};

template <size_t count = kGradients>
std::array<bool, count> flags_from(const std::vector<bool>& needs, size_t first) {
  std::array<bool, count> flags;
  for (size_t n = 0; n < count; ++n) flags[n] = needs[first + n];
  return flags;
}

// Stores the gradients from the tensor at position `first` on.
template <class Gradients>
void store(variable_list& result, size_t first, const Gradients& gradients) {
  for (const at::Tensor& grad : list_of(gradients)) result[first++] = grad;
}

struct AttentionFamily {
  static constexpr const char* kName = "flash_attn";
  using Gradients = flash_attn_ext::Gradients;
  using InputTangents = flash_attn_ext::InputTangents;
  using Forward = Attention;
  using Backward = AttentionBackward;
  using Jvp = AttentionJvp;
  using DoubleBackward = AttentionDoubleBackward;
};

template <class F>
struct DerivativeCalls {
  using Tensors = typename F::Forward::Tensors;
  using Options = typename F::Forward::Options;
  using BackwardTensors = typename F::Backward::Tensors;
  using BackwardOptions = typename F::Backward::Options;
  using JvpTensors = typename F::Jvp::Tensors;
  using DoubleBackwardTensors = typename F::DoubleBackward::Tensors;
  using Gradients = typename F::Gradients;
  using InputTangents = typename F::InputTangents;
  static constexpr size_t kTensors = std::size(Tensors::kRules), kGradients = Gradients::kCount;
  using GradFlags = std::array<bool, kGradients>;

  static BackwardTensors backward_tensors(const Tensors& x, const at::Tensor& out, const at::Tensor& lse,
                                          const Cotangents& c) {
    BackwardTensors tensors;
    tensors.set_forward(x);
    tensors.out = out;
    tensors.lse = lse;
    tensors.grad_out = defined_or_none(c.out);
    tensors.grad_lse = defined_or_none(c.lse);
    return tensors;
  }

  // B(X, c). All gradients are undefined if no gradient is wanted or c is zero.
  static Gradients backward_of(const Tensors& x, const at::Tensor& out, const at::Tensor& lse,
                               const Cotangents& c, const Options& options, const GradFlags& wanted) {
    if (!c.any() || std::find(wanted.begin(), wanted.end(), true) == wanted.end()) return {};
    BackwardOptions backward_options;
    backward_options.set_forward(options);
    backward_options.grad_mask = wanted;
    return call_with_derivatives<typename F::Backward>(backward_tensors(x, out, lse, c), backward_options);
  }

  // J(X, t).
  static AttentionJvpResult jvp_of(const Tensors& x, const InputTangents& t, const Options& options) {
    JvpTensors tensors;
    tensors.set_tangents(t);
    tensors.set_forward(x);
    return call<typename F::Jvp>(tensors, options);
  }

  // H(X, c, t). `output_tangents` is J(X, t).
  static Gradients double_backward_of(const Tensors& x, const at::Tensor& out, const at::Tensor& lse,
                                      const Cotangents& c, const InputTangents& t,
                                      const AttentionJvpResult& output_tangents, const Options& options,
                                      const GradFlags& wanted) {
    if (!c.any() || !any_defined(t) || std::find(wanted.begin(), wanted.end(), true) == wanted.end())
      return {};
    DoubleBackwardTensors tensors;
    tensors.set_tangents(t);
    tensors.set_forward(x);
    tensors.grad_out = defined_or_none(c.out);
    tensors.grad_lse = defined_or_none(c.lse);
    tensors.out = out;
    tensors.lse = lse;
    tensors.tangent_out = output_tangents.tangent_out;
    tensors.tangent_lse = output_tangents.tangent_lse;
    BackwardOptions backward_options;
    backward_options.set_forward(options);
    backward_options.grad_mask = wanted;
    return call<typename F::DoubleBackward>(tensors, backward_options);
  }
};

}  // namespace flash_attn_ext
