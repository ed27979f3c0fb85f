// Autograd key of the attention weights. The first derivative has a kernel. Second derivatives and forward mode use the
// definition: W is the result of attention with the unit vectors as values,
//
//   W = 1/H sum_h P_h I
//
// and attention's own derivatives. Each call has 512 columns of I. The cost is O(S_q S_k^2), and the memory at most
// H x S_q x 512.
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>

#include "../declarations/implement.h"
#include "../declarations/library.h"
#include "../weights/weights.h"
#include "autograd_calls.h"

namespace flash_attn_ext {
namespace {

constexpr size_t kTensors = std::size(WeightsTensors::kRules);
constexpr int64_t kColumns = 512;  // of I, in one call

// Calls body(x, first, columns) for each block of columns of I. x are the tensors of attention with these columns as value.
template <class Body>
void for_unit_values(const WeightsTensors& given, const Body& body) {
  AttentionTensors x = given.attention();
  const int64_t keys = given.key.size(2);
  for (int64_t first = 0; first < keys; first += kColumns) {
    const int64_t columns = std::min(kColumns, keys - first);
    const at::Tensor units = at::zeros({keys, columns}, given.key.options());
    units.diagonal(-first).fill_(1);
    x.value = units.expand({given.key.size(0), given.key.size(1), keys, columns});
    body(x, first, columns);
  }
}

at::Tensor by_attention(const WeightsTensors& given, const WeightsOptions& options) {
  std::vector<at::Tensor> blocks;
  for_unit_values(given, [&](const AttentionTensors& x, int64_t, int64_t) {
    blocks.push_back(call<Attention>(x, options.attention()).out.mean(1));
  });
  return at::cat(blocks, 2);
}

Gradients gradients_by_attention(const WeightsBackwardTensors& given, const WeightsBackwardOptions& options) {
  using Calls = DerivativeCalls<AttentionFamily>;
  const int64_t heads = given.query.size(1);
  const AttentionOptions forward_options = options.forward().attention();
  Gradients sum;
  for_unit_values(given.forward(), [&](const AttentionTensors& x, int64_t first, int64_t columns) {
    AttentionResult
        computed;  // without a graph: the derivatives of attention's backward treat it as a function of x
    {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      computed = call<Attention>(x, forward_options);
    }
    const at::Tensor grad_out = given.grad_weights.narrow(2, first, columns).div(heads).unsqueeze(1);
    add_gradients(sum,
                  Calls::backward_of(x, computed.out, computed.lse, {grad_out.expand_as(computed.out), {}},
                                     forward_options, options.grad_mask));
  });
  return sum;
}

variable_list differentiate_weights(const Recorded& recorded, const variable_list& grads) {
  const variable_list saved = saved_tensors(recorded, kTensors);
  if (!grads[0].defined()) return gradients_of_arguments(variable_list(kTensors), saved);
  WeightsBackwardTensors tensors;
  tensors.set_forward(struct_of<WeightsTensors>(saved));
  tensors.grad_weights = grads[0];
  const std::vector<bool> needs = needs_gradient(recorded, saved, kTensors);
  GradMask wanted;
#define FA_WANT(name, ...) wanted.name = needs[position_of<WeightsTensors>(#name)];
  FA_WEIGHTS_DIFFERENTIABLE(FA_WANT)
#undef FA_WANT
  WeightsBackwardOptions options;
  options.set_forward(recorded_options<WeightsOptions>(recorded));
  options.grad_mask = wanted.flags();
  const Gradients gradients = call<AttentionWeightsBackward>(tensors, options);
  variable_list result(kTensors);
#define FA_STORE(name, ...) result[position_of<WeightsTensors>(#name)] = gradients.name;
  FA_WEIGHTS_DIFFERENTIABLE(FA_STORE)
#undef FA_STORE
  return gradients_of_arguments(result, saved);
}

// Refuses gradients of the tensors that are not in FA_WEIGHTS_DIFFERENTIABLE: autograd would drop them silently.
void check_only_differentiable_need_gradients(const WeightsTensors& given) {
  const auto check = [](const char* name, const OptionalTensor& t) {
    TORCH_CHECK_VALUE(!t || !((at::GradMode::is_enabled() && t->requires_grad()) || tangent_of(t)), name,
                      ": got a tensor that needs a gradient; allowed: one that does not");
  };
#define FA_CHECK(name, ...) check(#name, given.name);
  FA_WITHOUT_GRADIENT(FA_CHECK)
#undef FA_CHECK
  check("lse", given.lse);
}

WeightsResult weights(const WeightsTensors& given, const WeightsOptions& options) {
  const Differentiated how = how_differentiated(given);
  if (how.reverse || how.forward) {
    AttentionWeights::check(given, options);
    check_only_differentiable_need_gradients(given);
    if (how.forward && given.key.sym_size(2) != 0) return {by_attention(given, options)};
    return {record(differentiate_weights, given, options, [&] {
      return Computed{{call<AttentionWeights>(given, options).weights}, list_of(given)};
    })[0]};
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call<AttentionWeights>(given, options);
}

Gradients weights_backward(const WeightsBackwardTensors& given, const WeightsBackwardOptions& options) {
  const Differentiated how = how_differentiated(given);
  if (how.reverse || how.forward) {
    AttentionWeightsBackward::check(given, options);
    if (given.key.sym_size(2) != 0) return gradients_by_attention(given, options);
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call<AttentionWeightsBackward>(given, options);
}

}  // namespace

FA_LIBRARY_IMPL(Autograd, m) {
  implement<AttentionWeights, weights>(m);
  implement<AttentionWeightsBackward, weights_backward>(m);
}

}  // namespace flash_attn_ext
