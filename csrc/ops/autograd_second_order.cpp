// Autograd key of the operators that are derivatives already: attention_jvp and attention_double_backward. The table in
// autograd.cpp says what their own derivatives are.
#include <torch/library.h>

#include "autograd_calls.h"

namespace flash_attn_ext {
namespace {

class AttentionJvpFunction : public torch::autograd::Function<AttentionJvpFunction> {
 public:
  template <class... Tensor>
  static variable_list forward(AutogradContext* ctx, const AttentionOptions& options, std::nullptr_t,
                               std::nullptr_t, const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const AttentionJvpResult result = call<AttentionJvp>({tensor...}, options);
    variable_list saved{tensor_or_undefined(tensor)...};
    for (const at::Tensor& t : list_of(result)) saved.push_back(t);
    ctx->save_for_backward(saved);
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);
    return list_of(result);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto given = struct_of<AttentionJvpTensors>(saved);
    constexpr size_t kCount = std::size(AttentionJvpTensors::kRules),
                     kFirst = kGradients;  // after the tangents
    const auto result = struct_of<AttentionJvpResult>({saved.begin() + kCount, saved.end()});
    const auto options = unpack_options<AttentionOptions>(ctx->saved_data["options"]);
    const std::vector<bool> needs = needs_gradient(ctx, saved, kCount);
    const AttentionTensors x = given.forward();
    const GradFlags wanted = flags_from(needs, kFirst);

    variable_list gradients = gradients_of_arguments(kCount);
    const Cotangents of_result{grads[0], grads[1]}, of_tangents{grads[2], grads[3]};
    put(gradients, 0, backward_of(x, result.out, result.lse, of_tangents, options, flags_from(needs, 0)));
    Gradients of_x =
        double_backward_of(x, result.out, result.lse, of_tangents, given.tangents(), result, options, wanted);
    add(of_x, backward_of(x, result.out, result.lse, of_result, options, wanted));
    put(gradients, kFirst, of_x);
    return gradients;
  }
};

AttentionJvpResult attention_jvp_autograd(const AttentionJvpTensors& given, const AttentionOptions& options) {
  const Differentiated how = how_differentiated(given);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !how.forward,
      "flash_attn: forward-mode AD of its forward-mode AD (jvp of jvp, jacfwd of jacfwd) is "
      "not implemented; torch.func.hessian and jvp of grad are");
  if (!how.reverse) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<AttentionJvp>(given, options);
  }
  const variable_list results = std::apply(
      [&](const auto&... tensor) {
        return AttentionJvpFunction::apply(options, nullptr, nullptr, tensor...);
      },
      given.tie());
  return struct_of<AttentionJvpResult>(results);
}

class AttentionDoubleBackwardFunction : public torch::autograd::Function<AttentionDoubleBackwardFunction> {
 public:
  template <class... Tensor>
  static variable_list forward(AutogradContext* ctx, const AttentionBackwardOptions& options, std::nullptr_t,
                               std::nullptr_t, const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    ctx->save_for_backward({tensor_or_undefined(tensor)...});
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);
    return wanted_of(call<AttentionDoubleBackward>({tensor...}, options));
  }

  // H is linear in the tangents, and symmetric in them and the directions that its results are contracted with.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const auto given = struct_of<AttentionDoubleBackwardTensors>(saved);
    const auto options = unpack_options<AttentionBackwardOptions>(ctx->saved_data["options"]);
    constexpr size_t kCount = std::size(AttentionDoubleBackwardTensors::kRules), kTangents = 2;
    const std::vector<bool> needs = needs_gradient(ctx, saved, kCount);
    for (size_t n = 0; n < kTangents + kGradients + kTensors; ++n)
      TORCH_CHECK_NOT_IMPLEMENTED(n - kTangents < kGradients || !needs[n],
                                  "flash_attn: its third derivative, with respect to ",
                                  AttentionDoubleBackwardTensors::kRules[n].name, ", is not implemented");

    variable_list result = gradients_of_arguments(kCount);
    const InputTangents t = as_tangents(gradients_from(grads, options.grad_mask));
    if (!any_defined(t)) return result;
    put(result, kTangents,
        double_backward_of(given.forward(), given.out, given.lse, {saved[0], saved[1]}, t,
                           jvp_of(given.forward(), t, options.forward()), options.forward(),
                           flags_from(needs, kTangents)));
    return result;
  }
};

Gradients attention_double_backward_autograd(const AttentionDoubleBackwardTensors& given,
                                             const AttentionBackwardOptions& options) {
  const Differentiated how = how_differentiated(given);
  TORCH_CHECK_NOT_IMPLEMENTED(!how.forward,
                              "flash_attn: its third derivative, in forward mode, is not implemented");
  if (!how.reverse) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<AttentionDoubleBackward>(given, options);
  }
  const variable_list wanted = std::apply(
      [&](const auto&... tensor) {
        return AttentionDoubleBackwardFunction::apply(options, nullptr, nullptr, tensor...);
      },
      given.tie());
  return gradients_from(wanted, options.grad_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) {
  implement<AttentionJvp, attention_jvp_autograd>(m);
  implement<AttentionDoubleBackward, attention_double_backward_autograd>(m);
}

}  // namespace flash_attn_ext
