// Autograd key: the forward saves its inputs, out and lse only; the backward recomputes the rest tile by
// tile.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "ops.h"

namespace flash_attn_ext {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

OptionalTensor defined_or_none(const at::Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

// Whether autograd has anything to record: setting up a Function takes longer than attention on a few rows. A
// forward-mode tangent counts, so that the Functions below refuse it loudly.
bool is_differentiated(const OptionalTensor& t) {
  return t && ((at::GradMode::is_enabled() && t->requires_grad()) || t->_fw_grad(/*level=*/0).defined());
}

template <class... Tensors>
bool is_any_differentiated(const Tensors&... tensors) {
  return (is_differentiated(tensors) || ...);
}

// The options as one value: each entry of saved_data is a hash table's node.
c10::IValue pack_options(const AttentionOptions& o) {
  std::vector<c10::IValue> values{o.scale,   o.causal,    o.lower_right, o.window_left, o.window_right,
                                  o.softcap, o.dropout_p, o.num_splits,  o.unified_max, o.deterministic};
  return c10::ivalue::Tuple::create(std::move(values));
}

AttentionOptions unpack_options(const c10::IValue& packed) {
  const std::vector<c10::IValue> o = packed.toTupleRef().elements().vec();
  return {o[0].toOptional<double>(),
          o[1].toBool(),
          o[2].toBool(),
          o[3].toInt(),
          o[4].toInt(),
          o[5].toDouble(),
          o[6].toDouble(),
          o[7].toInt(),
          o[8].toOptional<double>(),
          o[9].toBool()};
}

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  // The tensors come as arguments of their own because that is where autograd looks for what needs a
  // gradient.
  static variable_list forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const OptionalTensor& attn_mask,
                               const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                               const AttentionOptions& options) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, lse] = call_attention(FA_INPUTS, options);
    ctx->save_for_backward({query, key, value, attn_mask.value_or(at::Tensor()),
                            alibi_slopes.value_or(at::Tensor()), rng_state.value_or(at::Tensor()), out, lse});
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);  // an unused lse costs nothing in the backward
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const AttentionInputs inputs{saved[0],
                                 saved[1],
                                 saved[2],
                                 defined_or_none(saved[3]),
                                 defined_or_none(saved[4]),
                                 defined_or_none(saved[5])};
    const AttentionOptions options = unpack_options(ctx->saved_data["options"]);
    const GradMask wanted{ctx->needs_input_grad(0), ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                          saved[3].defined() && ctx->needs_input_grad(3),
                          saved[4].defined() && ctx->needs_input_grad(saved[3].defined() ? 4 : 3)};
    auto [dq, dk, dv, dmask, dslopes] = call_attention_backward(
        defined_or_none(grads[0]), defined_or_none(grads[1]), inputs, saved[6], saved[7], options, wanted);
    return {dq, dk, dv, dmask, dslopes, Variable(), Variable()};
  }
};

ForwardResult attention_autograd(FA_INPUT_ARGS, FA_OPTION_ARGS) {
  if (!is_any_differentiated(query, key, value, attn_mask, alibi_slopes)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_attention(FA_INPUTS, FA_OPTIONS);
  }
  const variable_list results =
      AttentionFunction::apply(query, key, value, attn_mask, alibi_slopes, rng_state, FA_OPTIONS);
  return {results[0], results[1]};
}

// Differentiating the backward again would need the second-order formulas. Until they exist it is an error: a
// gradient that silently lacks a term is worse.
class AttentionBackwardFunction : public torch::autograd::Function<AttentionBackwardFunction> {
 public:
  // Returns the wanted gradients only: autograd cannot wrap undefined outputs.
  static variable_list forward(AutogradContext*, const OptionalTensor& grad_out,
                               const OptionalTensor& grad_lse, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value, const OptionalTensor& attn_mask,
                               const OptionalTensor& alibi_slopes, const OptionalTensor& rng_state,
                               const at::Tensor& out, const at::Tensor& lse, const AttentionOptions& options,
                               const GradMask& grad_mask) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [dq, dk, dv, dmask, dslopes] =
        call_attention_backward(grad_out, grad_lse, FA_INPUTS, out, lse, options, grad_mask);
    variable_list wanted;
    for (const at::Tensor& grad : {dq, dk, dv, dmask, dslopes})
      if (grad.defined()) wanted.push_back(grad);
    return wanted;
  }

  static variable_list backward(AutogradContext*, const variable_list&) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        false, "flash_attn: double backward (a gradient of its gradients) is not implemented");
  }
};

BackwardResult attention_backward_autograd(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                                           FA_INPUT_ARGS, const at::Tensor& out, const at::Tensor& lse,
                                           FA_OPTION_ARGS, GradMask::Flags grad_mask) {
  if (!is_any_differentiated(grad_out, grad_lse, query, key, value, attn_mask, alibi_slopes, out, lse)) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call_attention_backward(grad_out, grad_lse, FA_INPUTS, out, lse, FA_OPTIONS,
                                   GradMask::from(grad_mask));
  }
  const variable_list wanted =
      AttentionBackwardFunction::apply(grad_out, grad_lse, query, key, value, attn_mask, alibi_slopes,
                                       rng_state, out, lse, FA_OPTIONS, GradMask::from(grad_mask));
  auto next = wanted.begin();
  auto take = [&](size_t n) { return grad_mask[n] ? *next++ : at::Tensor(); };
  return {take(0), take(1), take(2), take(3), take(4)};  // a braced list is evaluated left to right
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) {
  m.impl("attention", attention_autograd);
  m.impl("attention_backward", attention_backward_autograd);
}

}  // namespace flash_attn_ext
