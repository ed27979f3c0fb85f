// Autograd key: the forward saves its inputs, out and lse only; the backward recomputes the rest tile by tile.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops.h"

namespace flash_attn_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Whether autograd has anything to record: setting up a Function takes longer than attention on a few rows. A
// forward-mode tangent counts, so that it is refused and never dropped.
template <class Tensors>
bool is_any_differentiated(const Tensors& tensors) {
  bool any = false;
  for_each_tensor(tensors, [&](const TensorRule&, const auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (!t) return;
    TORCH_CHECK_NOT_IMPLEMENTED(!t->_fw_grad(/*level=*/0).defined(),
                                "flash_attn: forward-mode AD (jvp, jacfwd, hessian) is not implemented");
    any = any || (at::GradMode::is_enabled() && t->requires_grad());
  });
  return any;
}

at::Tensor tensor_or_undefined(const at::Tensor& t) { return t; }
at::Tensor tensor_or_undefined(const OptionalTensor& t) { return t.value_or(at::Tensor()); }

void load(const at::Tensor& saved, at::Tensor& t) { t = saved; }
void load(const at::Tensor& saved, OptionalTensor& t) { t = defined_or_none(saved); }

// Autograd looks for what needs a gradient among the arguments, so the tensors are arguments of their own. They come
// last: the gradients of those before, which are none, are easy to count.
class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  template <class... Tensor>
  static variable_list forward(AutogradContext* ctx, const AttentionOptions& options,
                               const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, lse] = call<Attention>({tensor...}, options);
    ctx->save_for_backward({tensor_or_undefined(tensor)..., out, lse});
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);  // an unused lse costs nothing in the backward
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    auto next = saved.begin();
    AttentionTensors tensors;
    for_each_tensor(tensors, [&](const TensorRule&, auto& t) { load(*next++, t); });
    AttentionBackwardTensors inputs;
    inputs.set_forward(tensors);
    inputs.out = *next++;
    inputs.lse = *next++;
    inputs.grad_out = defined_or_none(grads[0]);
    inputs.grad_lse = defined_or_none(grads[1]);

    AttentionBackwardOptions options;
    options.set_forward(unpack_options<AttentionOptions>(ctx->saved_data["options"]));
    size_t edge = 0;  // tensors that were not given have none
    for (size_t n = 0; n < kGradients; ++n)
      options.grad_mask[n] = saved[n].defined() && ctx->needs_input_grad(edge++);

    const Gradients gradients = call<AttentionBackward>(inputs, options);
    variable_list result(1 + std::size(AttentionTensors::kRules));  // the options' is undefined
    std::apply(
        [&](const auto&... grad) {
          size_t n = 1;
          ((result[n++] = grad), ...);
        },
        gradients.tie());
    return result;
  }
};

AttentionResult attention_autograd(const AttentionTensors& tensors, const AttentionOptions& options) {
  if (!is_any_differentiated(tensors)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<Attention>(tensors, options);
  }
  const variable_list results = std::apply(
      [&](const auto&... tensor) { return AttentionFunction::apply(options, tensor...); }, tensors.tie());
  return {results[0], results[1]};
}

// Differentiating the backward again would need the second-order formulas. Until they exist it is an error: a
// gradient that silently lacks a term is worse.
class AttentionBackwardFunction : public torch::autograd::Function<AttentionBackwardFunction> {
 public:
  // Returns the wanted gradients only: autograd cannot wrap undefined outputs.
  template <class... Tensor>
  static variable_list forward(AutogradContext*, const AttentionBackwardOptions& options,
                               const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Gradients gradients = call<AttentionBackward>({tensor...}, options);
    variable_list wanted;
    std::apply([&](const auto&... grad) { ((grad.defined() ? wanted.push_back(grad) : void()), ...); },
               gradients.tie());
    return wanted;
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "flash_attn: double backward (a gradient of its gradients) is not implemented");
  }
};

Gradients attention_backward_autograd(const AttentionBackwardTensors& tensors,
                                      const AttentionBackwardOptions& options) {
  if (!is_any_differentiated(tensors)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<AttentionBackward>(tensors, options);
  }
  const variable_list wanted =
      std::apply([&](const auto&... tensor) { return AttentionBackwardFunction::apply(options, tensor...); },
                 tensors.tie());
  Gradients gradients;
  auto next = wanted.begin();
  auto flag = options.grad_mask.begin();
  std::apply([&](auto&... grad) { ((*flag++ ? void(grad = *next++) : void()), ...); }, gradients.tie());
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) {
  implement<Attention, attention_autograd>(m);
  implement<AttentionBackward, attention_backward_autograd>(m);
}

}  // namespace flash_attn_ext
