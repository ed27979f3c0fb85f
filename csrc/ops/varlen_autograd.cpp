// Autograd key of the operators on packed sequences: as autograd.cpp, the forward saves its inputs, out and lse only.
#include <torch/library.h>

#include <algorithm>

#include "autograd_lists.h"
#include "varlen.h"

namespace flash_attn_ext {
namespace {

using torch::autograd::AutogradContext;

template <class Tensors>
bool is_any_differentiated(const Tensors& tensors) {
  bool any = false;
  for_each_tensor(tensors, [&](const TensorRule&, const auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (!t) return;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !t->_fw_grad(/*level=*/0).defined(),
        "flash_attn_varlen: forward-mode AD (jvp, jacfwd, hessian) is not implemented");
    any = any || (at::GradMode::is_enabled() && t->requires_grad());
  });
  return any;
}

class VarlenFunction : public torch::autograd::Function<VarlenFunction> {
 public:
  template <class... Tensor>
  static variable_list forward(AutogradContext* ctx, const VarlenOptions& options, const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, lse] = call<AttentionVarlen>({tensor...}, options);
    ctx->save_for_backward({tensor_or_undefined(tensor)..., out, lse});
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);  // an unused lse costs nothing in the backward
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    constexpr size_t kTensors = std::size(VarlenTensors::kRules);
    VarlenBackwardTensors inputs;
    inputs.set_forward(struct_of<VarlenTensors>(saved));
    inputs.out = saved[kTensors];
    inputs.lse = saved[kTensors + 1];
    inputs.grad_out = defined_or_none(grads[0]);
    inputs.grad_lse = defined_or_none(grads[1]);

    VarlenBackwardOptions options;
    options.set_forward(unpack_options<VarlenOptions>(ctx->saved_data["options"]));
    size_t edge = 0;  // tensors that were not given have none
    for (size_t n = 0; n < kGradients; ++n)
      options.grad_mask[n] = saved[n].defined() && ctx->needs_input_grad(edge++);

    const Gradients gradients = call<AttentionVarlenBackward>(inputs, options);
    variable_list result(1 + kTensors);  // the options' is undefined
    const variable_list in_order = list_of(gradients);
    std::copy(in_order.begin(), in_order.end(), result.begin() + 1);
    return result;
  }
};

AttentionResult varlen_autograd(const VarlenTensors& tensors, const VarlenOptions& options) {
  if (!is_any_differentiated(tensors)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<AttentionVarlen>(tensors, options);
  }
  const variable_list results = std::apply(
      [&](const auto&... tensor) { return VarlenFunction::apply(options, tensor...); }, tensors.tie());
  return {results[0], results[1]};
}

// Refuses to be differentiated: a gradient that silently lacks a term is worse than none.
class VarlenBackwardFunction : public torch::autograd::Function<VarlenBackwardFunction> {
 public:
  template <class... Tensor>
  static variable_list forward(AutogradContext*, const VarlenBackwardOptions& options,
                               const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return wanted_of(call<AttentionVarlenBackward>({tensor...}, options));
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "flash_attn_varlen: double backward (a gradient of its gradients) is not implemented");
  }
};

Gradients varlen_backward_autograd(const VarlenBackwardTensors& tensors,
                                   const VarlenBackwardOptions& options) {
  if (!is_any_differentiated(tensors)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<AttentionVarlenBackward>(tensors, options);
  }
  const variable_list wanted =
      std::apply([&](const auto&... tensor) { return VarlenBackwardFunction::apply(options, tensor...); },
                 tensors.tie());
  return gradients_from(wanted, options.grad_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) {
  implement<AttentionVarlen, varlen_autograd>(m);
  implement<AttentionVarlenBackward, varlen_backward_autograd>(m);
}

}  // namespace flash_attn_ext
