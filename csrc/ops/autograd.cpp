// Autograd key: reverse mode, forward mode, and both of each other, by the table in docs/derivative_formulas.md.
//
//   X: attention's tensors    c: grad_out, grad_lse    t: the tangents of X
//   attention           F(X)         reverse: attention_backward(X, c)        forward: attention_jvp(X, t)
//   attention_backward  B(X, c)      reverse: H(X, c, t) and J(X, t)          forward: H(X, c, t) and B(X, tangents of c)
//   attention_jvp       J(X, t)      reverse: H(X, c, t) and B(X, c)          forward: third order is not implemented
//   attention_double_backward H(X, c, t): reverse to t alone, H again; nothing else is implemented
//
// The forward saves its inputs, out and lse only; what comes later recomputes the rest tile by tile.
// The last two are in autograd_second_order.cpp.
#include <torch/library.h>

#include "autograd_calls.h"

namespace flash_attn_ext {
namespace {

class AttentionFunction : public torch::autograd::Function<AttentionFunction> {
 public:
  // `known` is the result, where forward mode has it already.
  template <class... Tensor>
  static variable_list forward(AutogradContext* ctx, const AttentionOptions& options,
                               const AttentionTensors& given, const AttentionResult& known,
                               const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [out, lse] = known.out.defined() ? known : call<Attention>({tensor...}, options);
    variable_list saved = list_of(given);
    saved.push_back(out);
    saved.push_back(lse);
    ctx->save_for_backward(saved);
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);  // an unused lse costs nothing in the backward
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto options = unpack_options<AttentionOptions>(ctx->saved_data["options"]);
    const GradFlags wanted = flags_from(needs_gradient(ctx, saved, kTensors), 0);
    variable_list result = gradients_of_arguments(kTensors);
    put(result, 0,
        backward_of(struct_of<AttentionTensors>(saved), saved[kTensors], saved[kTensors + 1],
                    {grads[0], grads[1]}, options, wanted));
    return result;
  }
};

AttentionResult attention_autograd(const AttentionTensors& given, const AttentionOptions& options) {
  const Differentiated how = how_differentiated(given);
  if (!how.reverse && !how.forward) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<Attention>(given, options);
  }
  const AttentionTensors tensors = how.forward ? primals_of(given) : given;
  AttentionJvpResult moved;
  AttentionResult known;
  if (how.forward) {
    moved = jvp_of(tensors, tangents_of(given), options);
    known = {moved.out.detach(), moved.lse.detach()};
  }
  if (how.reverse) {
    const variable_list results = std::apply(
        [&](const auto&... tensor) { return AttentionFunction::apply(options, given, known, tensor...); },
        tensors.tie());
    known = {results[0], results[1]};
  }
  set_tangent(known.out, moved.tangent_out);
  set_tangent(known.lse, moved.tangent_lse);
  return known;
}

class AttentionBackwardFunction : public torch::autograd::Function<AttentionBackwardFunction> {
 public:
  template <class... Tensor>
  static variable_list forward(AutogradContext* ctx, const AttentionBackwardOptions& options,
                               const AttentionBackwardTensors& given, std::nullptr_t,
                               const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward(list_of(given));
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);
    return wanted_of(call<AttentionBackward>({tensor...}, options));
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto given = struct_of<AttentionBackwardTensors>(saved);
    const auto options = unpack_options<AttentionBackwardOptions>(ctx->saved_data["options"]);

    constexpr size_t kCount = std::size(AttentionBackwardTensors::kRules),
                     kFirst = 2;  // after grad_out, grad_lse
    variable_list result = gradients_of_arguments(kCount);
    const InputTangents t = as_tangents(gradients_from(grads, options.grad_mask));
    if (!any_defined(t)) return result;
    const std::vector<bool> needs = needs_gradient(ctx, saved, kCount);
    const AttentionJvpResult moved = jvp_of(given.forward(), t, options.forward());
    if (needs[0]) result[kOthers] = moved.tangent_out;
    if (needs[1]) result[kOthers + 1] = moved.tangent_lse;
    put(result, kFirst,
        double_backward_of(given.forward(), given.out, given.lse, {saved[0], saved[1]}, t, moved,
                           options.forward(), flags_from(needs, kFirst)));
    return result;  // none for out and lse: what depends on them does so through X
  }
};

Gradients attention_backward_autograd(const AttentionBackwardTensors& given,
                                      const AttentionBackwardOptions& options) {
  const Differentiated how = how_differentiated(given);
  if (!how.reverse && !how.forward) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<AttentionBackward>(given, options);
  }
  const AttentionBackwardTensors tensors = how.forward ? primals_of(given) : given;
  Gradients gradients;
  if (how.reverse) {
    const variable_list wanted = std::apply(
        [&](const auto&... tensor) {
          return AttentionBackwardFunction::apply(options, given, nullptr, tensor...);
        },
        tensors.tie());
    gradients = gradients_from(wanted, options.grad_mask);
  } else {
    gradients = call<AttentionBackward>(tensors, options);
  }
  if (!how.forward) return gradients;

  const AttentionTensors x = tensors.forward();
  const AttentionOptions forward_options = options.forward();
  const InputTangents t = tangents_of(given.forward());
  const Cotangents moved_cotangents{tangent_of(given.grad_out).value_or(at::Tensor()),
                                    tangent_of(given.grad_lse).value_or(at::Tensor())};
  Gradients tangents =
      backward_of(x, tensors.out, tensors.lse, moved_cotangents, forward_options, options.grad_mask);
  if (any_defined(t))
    add(tangents,
        double_backward_of(x, tensors.out, tensors.lse,
                           {tensor_or_undefined(tensors.grad_out), tensor_or_undefined(tensors.grad_lse)}, t,
                           jvp_of(x, t, forward_options), forward_options, options.grad_mask));
#define FA_SET_TANGENT(name, ...) set_tangent(gradients.name, tangents.name);
  FA_ATTENTION_DIFFERENTIABLE(FA_SET_TANGENT)
#undef FA_SET_TANGENT
  return gradients;
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) {
  implement<Attention, attention_autograd>(m);
  implement<AttentionBackward, attention_backward_autograd>(m);
}

}  // namespace flash_attn_ext
