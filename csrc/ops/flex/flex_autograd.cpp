// Autograd key of attention with functions of the user: the first derivative in reverse mode, and nothing else.
#include <torch/library.h>

#include "../autograd/autograd_calls.h"
#include "flex.h"

namespace flash_attn_ext {
namespace {

constexpr size_t kFlexTensors = std::size(FlexTensors::kRules);

class FlexFunction : public torch::autograd::Function<FlexFunction> {
 public:
  template <class... Tensor>
  static variable_list forward(AutogradContext* ctx, const FlexOptions& options, const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [out, lse] = call<AttentionFlex>({tensor...}, options);
    ctx->save_for_backward({tensor_or_undefined(tensor)..., out, lse});
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const std::vector<bool> needs = needs_gradient(ctx, saved, kFlexTensors);
    FlexBackwardTensors tensors;
    tensors.set_forward(struct_of<FlexTensors>({saved.begin(), saved.begin() + kFlexTensors}));
    tensors.out = saved[kFlexTensors];
    tensors.lse = saved[kFlexTensors + 1];
    tensors.grad_out = defined_or_none(grads[0]);
    tensors.grad_lse = defined_or_none(grads[1]);
    FlexBackwardOptions options;
    options.set_forward(unpack_options<FlexOptions>(ctx->saved_data["options"]));
    options.grad_mask = flags_from(needs, 0);
    options.grad_captured = needs[kGradients];
    variable_list result(1);  // none for the options
    for (at::Tensor& gradient : list_of(call<AttentionFlexBackward>(tensors, options)))
      result.push_back(std::move(gradient));
    result.resize(1 + kFlexTensors);
    return result;
  }
};

AttentionResult flex(const FlexTensors& given, const FlexOptions& options) {
  const Differentiated how = how_differentiated(given);
  TORCH_CHECK_NOT_IMPLEMENTED(!how.forward,
                              "flex_attention: forward-mode AD is not implemented; allowed: backward");
  if (!how.reverse) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<AttentionFlex>(given, options);
  }
  AttentionFlex::check(given, options);
  const variable_list result =
      std::apply([&](const auto&... tensor) { return FlexFunction::apply(options, tensor...); }, given.tie());
  return {result[0], result[1]};
}

FlexGradients flex_backward(const FlexBackwardTensors& given, const FlexBackwardOptions& options) {
  const Differentiated how = how_differentiated(given);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !how.reverse && !how.forward,
      "flex_attention: its second derivative is not implemented; allowed: the first one");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call<AttentionFlexBackward>(given, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) {
  implement<AttentionFlex, flex>(m);
  implement<AttentionFlexBackward, flex_backward>(m);
}

}  // namespace flash_attn_ext
