// Autograd key of attention by index: the first derivative in reverse mode, and nothing else.
#include <torch/library.h>

#include "../autograd/autograd_calls.h"
#include "indexed.h"

namespace flash_attn_ext {
namespace {

constexpr size_t kIndexedTensors = std::size(IndexedTensors::kRules);

class IndexedFunction : public torch::autograd::Function<IndexedFunction> {
 public:
  template <class... Tensor>
  static variable_list forward(AutogradContext* ctx, const IndexedOptions& options, const Tensor&... tensor) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const auto [out, lse] = call<AttentionIndexed>({tensor...}, options);
    ctx->save_for_backward({tensor_or_undefined(tensor)..., out, lse});
    ctx->saved_data["options"] = pack_options(options);
    ctx->set_materialize_grads(false);
    return {out, lse};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const std::vector<bool> needs = needs_gradient(ctx, saved, kIndexedTensors);
    IndexedBackwardTensors tensors;
    tensors.set_forward(struct_of<IndexedTensors>({saved.begin(), saved.begin() + kIndexedTensors}));
    tensors.out = saved[kIndexedTensors];
    tensors.lse = saved[kIndexedTensors + 1];
    tensors.grad_out = defined_or_none(grads[0]);
    tensors.grad_lse = defined_or_none(grads[1]);
    IndexedBackwardOptions options;
    options.set_forward(unpack_options<IndexedOptions>(ctx->saved_data["options"]));
    options.grad_mask = flags_from(needs, 0);
    variable_list result(1);  // none for the options
    for (at::Tensor& gradient : list_of(call<AttentionIndexedBackward>(tensors, options)))
      result.push_back(std::move(gradient));
    result.resize(1 + kIndexedTensors);
    return result;
  }
};

AttentionResult indexed(const IndexedTensors& given, const IndexedOptions& options) {
  const Differentiated how = how_differentiated(given);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !how.forward, "flash_attn: forward-mode AD is not implemented with key_indices; allowed: backward");
  if (!how.reverse) {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    return call<AttentionIndexed>(given, options);
  }
  AttentionIndexed::check(given, options);
  const variable_list result = std::apply(
      [&](const auto&... tensor) { return IndexedFunction::apply(options, tensor...); }, given.tie());
  return {result[0], result[1]};
}

Gradients indexed_backward(const IndexedBackwardTensors& given, const IndexedBackwardOptions& options) {
  const Differentiated how = how_differentiated(given);
  TORCH_CHECK_NOT_IMPLEMENTED(
      !how.reverse && !how.forward,
      "flash_attn: its second derivative is not implemented with key_indices; allowed: the first one");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call<AttentionIndexedBackward>(given, options);
}

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, Autograd, m) {
  implement<AttentionIndexed, indexed>(m);
  implement<AttentionIndexedBackward, indexed_backward>(m);
}

}  // namespace flash_attn_ext
