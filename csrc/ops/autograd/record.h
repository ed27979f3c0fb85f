// Records a call for reverse mode: one node in torch's graph for each call.
#pragma once

#include <c10/util/FunctionRef.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <memory>
#include <mutex>

#include "autograd_lists.h"

namespace flash_attn_ext {

using torch::autograd::AutogradContext;

// A recorded call, for its backward.
struct Recorded {
  AutogradContext* ctx;  // has the saved tensors
  // The options, a bit for each saved tensor that is defined, and the backward.
  c10::ArrayRef<c10::IValue> values;
};
using Backward = variable_list(const Recorded& call, const variable_list& grads);

inline variable_list differentiate(const Recorded& call, const variable_list& grads) {
  return reinterpret_cast<Backward*>(call.values.back().toInt())(call, grads);
}

// The class of all nodes, because torch's header compiles much code for each class. record() takes the place of its apply().
struct DerivativeFunction : torch::autograd::Function<DerivativeFunction> {
  // Compiled autograd calls it.
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    return differentiate({ctx, ctx->saved_data["values"].toTupleRef().elements()}, grads);
  }
};

}  // namespace flash_attn_ext

// Saves the tensors in memory that is allocated once. A vector that grows takes 2 us longer.
template <>
inline void torch::autograd::CppNode<flash_attn_ext::DerivativeFunction>::save_variables_to_ctx() {
  ctx_.saved_variables_.reserve(ctx_.to_save_.size());
  ctx_.save_variables();
}

namespace flash_attn_ext {

// The node of a call. CppNode has the rest: saved tensors, and compiled autograd.
struct DerivativeNode final : torch::autograd::CppNode<DerivativeFunction> {
  std::vector<c10::IValue> values;  // Recorded::values

  // CppNode would demangle the name of its class in each backward, in 2 us.
  std::string name() const override { return "FlashAttnExtBackward"; }
  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return differentiate({&ctx_, values}, grads);
  }
  // Compiled autograd alone reads these members of CppNode. A call would take 0.2 us to fill them.
  void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
    auto& node = const_cast<DerivativeNode&>(*this);
    node.is_variable_input_.assign(num_outputs(), true);
    node.ctx_.saved_data["values"] = c10::ivalue::Tuple::create(values);
    CppNode::compiled_args(args);
  }
};

// The pointer to a node depends on the version of torch.
using NodePointer = decltype(torch::autograd::Edge::function);
template <class Pointer>
Pointer new_node() {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>)
    return Pointer(new DerivativeNode, [](auto* node) { deleteNode(node); });
  else
    return c10::make_intrusive<DerivativeNode>();
}

struct Computed {
  variable_list results, saved;  // saved: for the backward. It begins with the operator's tensors
};

// Calls compute(), and records `backward` as the derivative of its results. `edges` lead to the inputs. It is
// torch::autograd::Function::apply() for results that are new tensors, without the steps for views and changed inputs.
inline variable_list record_values(Backward* backward, std::vector<c10::IValue> values,
                                   torch::autograd::edge_list edges, c10::function_ref<Computed()> compute) {
  if (const auto& functorch = at::functorch::functorchTLSAccessor())
    functorch->checkSupportsCppAutogradFunction();
  const NodePointer pointer = new_node<NodePointer>();
  auto& node = static_cast<DerivativeNode&>(*pointer);
  node.set_ctx_grad_fn(pointer);
  node.set_next_edges(std::move(edges));
  node.ctx_.set_materialize_grads(false);  // an unused lse costs nothing in the backward

  Computed computed;
  {
    at::AutoGradMode without_grad(false);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    computed = compute();
  }
  torch::autograd::set_history(computed.results, pointer);

  variable_list& saved = computed.saved;
  int64_t is_defined = 0;
  for (size_t n = 0; n < saved.size(); ++n) is_defined |= int64_t{saved[n].defined()} << n;
  saved.erase(std::remove_if(saved.begin(), saved.end(), [](const at::Tensor& t) { return !t.defined(); }),
              saved.end());
  values.emplace_back(is_defined);
  values.emplace_back(reinterpret_cast<int64_t>(backward));
  node.values = std::move(values);
  node.ctx_.save_for_backward(std::move(saved));
  node.save_variables_to_ctx();
  return std::move(computed.results);
}

// The same for the tensors and the options of an operator. The tensors have no forward-mode tangents.
template <class Tensors, class Options>
variable_list record(Backward* backward, const Tensors& tensors, const Options& options,
                     c10::function_ref<Computed()> compute) {
  std::vector<c10::IValue> values;
  values.reserve(kMembers<Options> + 2);
  push_members(values, options);
  torch::autograd::edge_list edges;
  edges.reserve(kMembers<Tensors>);
  for_each_present_tensor(tensors, [&](const TensorRule&, const at::Tensor& t) {
    edges.push_back(torch::autograd::impl::gradient_edge(t));
  });
  return record_values(backward, std::move(values), std::move(edges), compute);
}

// The tensors that a call saved, in a list of `count` or more. Undefined tensors are in their positions.
inline variable_list saved_tensors(const Recorded& call, size_t count) {
  variable_list defined = call.ctx->get_saved_variables();
  const int64_t is_defined = call.values[call.values.size() - 2].toInt();
  variable_list saved(count);
  size_t next = 0;
  for (size_t n = 0; next < defined.size(); ++n) {
    if (n >= saved.size()) saved.emplace_back();
    if (is_defined >> n & 1) saved[n] = std::move(defined[next++]);
  }
  return saved;
}

// The options that record() got.
template <class Options>
Options recorded_options(const Recorded& call) {
  Options options;
  load_members(call.values.data(), options);
  return options;
}

// For each of the operator's tensors: whether it needs a gradient. Each defined tensor has one edge, in order. An undefined
// tensor has no edge.
inline std::vector<bool> needs_gradient(const Recorded& call, const variable_list& saved, size_t count) {
  std::vector<bool> needs(count);
  size_t edge = 0;
  for (size_t n = 0; n < count; ++n) needs[n] = saved[n].defined() && call.ctx->needs_input_grad(edge++);
  return needs;
}

// The result of a backward: the gradients of the defined tensors. `gradients` has one element for each of the first tensors
// of `saved`.
inline variable_list gradients_of_arguments(const variable_list& gradients, const variable_list& saved) {
  variable_list result;
  result.reserve(gradients.size());
  for (size_t n = 0; n < gradients.size(); ++n)
    if (saved[n].defined()) result.push_back(gradients[n]);
  return result;
}

}  // namespace flash_attn_ext
