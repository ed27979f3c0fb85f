// The derivatives of a family of operators: reverse mode, forward mode, and each mode of the other. The table is also in
// docs/derivative_formulas.md. A family F names four operators; AttentionFamily in autograd_calls.h is an example.
//
//   X: the forward's tensors    c: grad_out, grad_lse    t: the tangents of X
//   Forward         F(X)         reverse: Backward(X, c)             forward: Jvp(X, t)
//   Backward        B(X, c)      reverse: H(X, c, t) and J(X, t)     forward: H(X, c, t) and B(X, tangents of c)
//   Jvp             J(X, t)      reverse: H(X, c, t) and B(X, c)     forward: third order, not implemented
//   DoubleBackward  H(X, c, t)   reverse with respect to t only: H again; other derivatives are not implemented
//
// The forward saves its inputs, out and lse. Every derivative recomputes the scores tile by tile.
#pragma once

#include "../declarations/implement.h"
#include "autograd_calls.h"

namespace flash_attn_ext {

template <class F>
struct Derivatives : DerivativeCalls<F> {
  using Calls = DerivativeCalls<F>;
  using Calls::backward_of, Calls::jvp_of, Calls::double_backward_of, Calls::kTensors, Calls::kGradients;
  using typename Calls::Gradients, typename Calls::InputTangents, typename Calls::GradFlags,
      typename Calls::Tensors, typename Calls::Options, typename Calls::BackwardTensors,
      typename Calls::BackwardOptions, typename Calls::JvpTensors, typename Calls::DoubleBackwardTensors;

  // The backward of Forward.
  static variable_list differentiate_forward(const Recorded& recorded, const variable_list& grads) {
    const variable_list saved = saved_tensors(recorded, kTensors + 2);
    const auto options = recorded_options<Options>(recorded);
    const GradFlags wanted = flags_from<kGradients>(needs_gradient(recorded, saved, kTensors), 0);
    variable_list result(kTensors);
    store(result, 0,
          backward_of(struct_of<Tensors>(saved), saved[kTensors], saved[kTensors + 1], {grads[0], grads[1]},
                      options, wanted));
    return gradients_of_arguments(result, saved);
  }

  // Refuses gradients of the tensors that are not in FA_DIFFERENTIABLE: autograd would drop them silently.
  static void check_only_differentiable_need_gradients(const Tensors& given) {
    size_t n = 0;
    for_each_tensor(given, [&](const TensorRule& rule, const auto& optional) {
      const at::Tensor* t = tensor_or_null(optional);
      if (n++ < kGradients || !t) return;
      TORCH_CHECK_VALUE(
          !(at::GradMode::is_enabled() && t->requires_grad()) && !t->_fw_grad(/*level=*/0).defined(),
          rule.name, ": got a tensor that needs a gradient; allowed: one that does not");
    });
  }

  static AttentionResult forward(const Tensors& given, const Options& options) {
    const Differentiated how = how_differentiated(given);
    if (!how.reverse && !how.forward) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call<typename F::Forward>(given, options);
    }
    check_only_differentiable_need_gradients(given);
    Tensors primals;
    if (how.forward) primals = primals_of(given);
    const Tensors& tensors = how.forward ? primals : given;
    AttentionJvpResult output_tangents;
    AttentionResult computed;
    if (how.forward) {
      output_tangents = jvp_of(tensors, tangents_of<InputTangents>(given), options);
      computed = {output_tangents.out.detach(), output_tangents.lse.detach()};
    }
    if (how.reverse) {
      // `given` is saved, because a backward in forward mode needs the tangents.
      record(differentiate_forward, tensors, options, [&] {
        if (!computed.out.defined()) computed = call<typename F::Forward>(tensors, options);
        variable_list saved = list_of(given, /*more=*/2);
        saved.push_back(computed.out);
        saved.push_back(computed.lse);
        return Computed{list_of(computed), std::move(saved)};
      });
    }
    set_tangent(computed.out, output_tangents.tangent_out);
    set_tangent(computed.lse, output_tangents.tangent_lse);
    return computed;
  }

  // The backward of Backward.
  static variable_list differentiate_backward(const Recorded& recorded, const variable_list& grads) {
    const variable_list saved = saved_tensors(recorded, kMembers<BackwardTensors>);
    const auto given = struct_of<BackwardTensors>(saved);
    const auto options = recorded_options<BackwardOptions>(recorded);

    constexpr size_t kCount = std::size(BackwardTensors::kRules),
                     kFirst = position_of<BackwardTensors>("query"),
                     kGradOut = position_of<BackwardTensors>("grad_out"),
                     kGradLse = position_of<BackwardTensors>("grad_lse");
    variable_list result(kCount);
    const InputTangents t = as_tangents<InputTangents>(gradients_from<Gradients>(grads, options.grad_mask));
    if (!any_defined(t)) return gradients_of_arguments(result, saved);
    const std::vector<bool> needs = needs_gradient(recorded, saved, kCount);
    const AttentionJvpResult output_tangents = jvp_of(given.forward(), t, options.forward());
    if (needs[kGradOut]) result[kGradOut] = output_tangents.tangent_out;
    if (needs[kGradLse]) result[kGradLse] = output_tangents.tangent_lse;
    store(result, kFirst,
          double_backward_of(given.forward(), given.out, given.lse, {saved[kGradOut], saved[kGradLse]}, t,
                             output_tangents, options.forward(), flags_from<kGradients>(needs, kFirst)));
    // out and lse have no gradient: they are functions of X, and H contains their part.
    return gradients_of_arguments(result, saved);
  }

  static Gradients backward(const BackwardTensors& given, const BackwardOptions& options) {
    const Differentiated how = how_differentiated(given);
    if (!how.reverse && !how.forward) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call<typename F::Backward>(given, options);
    }
    const BackwardTensors tensors = how.forward ? primals_of(given) : given;
    Gradients gradients;
    if (how.reverse) {
      const variable_list wanted = record(differentiate_backward, tensors, options, [&] {
        return Computed{wanted_of(call<typename F::Backward>(tensors, options)), list_of(given)};
      });
      gradients = gradients_from<Gradients>(wanted, options.grad_mask);
    } else {
      gradients = call<typename F::Backward>(tensors, options);
    }
    if (!how.forward) return gradients;

    const Tensors x = tensors.forward();
    const Options forward_options = options.forward();
    const InputTangents t = tangents_of<InputTangents>(given.forward());
    const Cotangents cotangent_tangents{tangent_of(given.grad_out).value_or(at::Tensor()),
                                        tangent_of(given.grad_lse).value_or(at::Tensor())};
    Gradients tangents =
        backward_of(x, tensors.out, tensors.lse, cotangent_tangents, forward_options, options.grad_mask);
    if (any_defined(t))
      add_gradients(
          tangents,
          double_backward_of(x, tensors.out, tensors.lse,
                             {tensor_or_undefined(tensors.grad_out), tensor_or_undefined(tensors.grad_lse)},
                             t, jvp_of(x, t, forward_options), forward_options, options.grad_mask));
    const variable_list of_tangents = list_of(tangents);
    size_t n = 0;
    for (const at::Tensor& gradient : list_of(gradients)) set_tangent(gradient, of_tangents[n++]);
    return gradients;
  }

  // The backward of Jvp.
  static variable_list differentiate_jvp(const Recorded& recorded, const variable_list& grads) {
    const variable_list saved = saved_tensors(recorded, kMembers<JvpTensors> + kMembers<AttentionJvpResult>);
    const auto given = struct_of<JvpTensors>(saved);
    constexpr size_t kCount = std::size(JvpTensors::kRules), kFirst = position_of<JvpTensors>("query"),
                     kFirstTangent = position_of<JvpTensors>("tangent_query");
    const auto result = struct_of<AttentionJvpResult>({saved.begin() + kCount, saved.end()});
    const auto options = recorded_options<Options>(recorded);
    const std::vector<bool> needs = needs_gradient(recorded, saved, kCount);
    const Tensors x = given.forward();
    const GradFlags wanted = flags_from<kGradients>(needs, kFirst);

    variable_list gradients(kCount);
    const Cotangents of_result{grads[0], grads[1]}, of_tangents{grads[2], grads[3]};
    store(gradients, kFirstTangent,
          backward_of(x, result.out, result.lse, of_tangents, options,
                      flags_from<kGradients>(needs, kFirstTangent)));
    Gradients of_x =
        double_backward_of(x, result.out, result.lse, of_tangents, given.tangents(), result, options, wanted);
    add_gradients(of_x, backward_of(x, result.out, result.lse, of_result, options, wanted));
    store(gradients, kFirst, of_x);
    return gradients_of_arguments(gradients, saved);
  }

  static AttentionJvpResult jvp(const JvpTensors& given, const Options& options) {
    const Differentiated how = how_differentiated(given);
    TORCH_CHECK_NOT_IMPLEMENTED(!how.forward, F::kName,
                                ": forward-mode AD of its forward-mode AD (jvp of jvp, jacfwd of jacfwd) is "
                                "not implemented; torch.func.hessian and jvp of grad are");
    if (!how.reverse) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call<typename F::Jvp>(given, options);
    }
    const variable_list results = record(differentiate_jvp, given, options, [&] {
      const variable_list results = list_of(call<typename F::Jvp>(given, options));
      variable_list saved = list_of(given, results.size());
      saved.insert(saved.end(), results.begin(), results.end());
      return Computed{results, std::move(saved)};
    });
    return struct_of<AttentionJvpResult>(results);
  }

  // The backward of DoubleBackward. H is linear in the tangents. It is symmetric in the tangents and the cotangents of its
  // results.
  static variable_list differentiate_double_backward(const Recorded& recorded, const variable_list& grads) {
    const variable_list saved = saved_tensors(recorded, kMembers<DoubleBackwardTensors>);
    const auto given = struct_of<DoubleBackwardTensors>(saved);
    const auto options = recorded_options<BackwardOptions>(recorded);
    constexpr size_t kCount = std::size(DoubleBackwardTensors::kRules),
                     kTangents = position_of<DoubleBackwardTensors>("tangent_query"),
                     kGradOut = position_of<DoubleBackwardTensors>("grad_out"),
                     kGradLse = position_of<DoubleBackwardTensors>("grad_lse"),
                     kResults = position_of<DoubleBackwardTensors>("out");
    const std::vector<bool> needs = needs_gradient(recorded, saved, kCount);
    for (size_t n = 0; n < kResults; ++n)
      TORCH_CHECK_NOT_IMPLEMENTED(n - kTangents < kGradients || !needs[n], F::kName,
                                  ": its third derivative, with respect to ",
                                  DoubleBackwardTensors::kRules[n].name, ", is not implemented");

    variable_list result(kCount);
    const InputTangents t = as_tangents<InputTangents>(gradients_from<Gradients>(grads, options.grad_mask));
    if (!any_defined(t)) return gradients_of_arguments(result, saved);
    store(result, kTangents,
          double_backward_of(given.forward(), given.out, given.lse, {saved[kGradOut], saved[kGradLse]}, t,
                             jvp_of(given.forward(), t, options.forward()), options.forward(),
                             flags_from<kGradients>(needs, kTangents)));
    return gradients_of_arguments(result, saved);
  }

  static Gradients double_backward(const DoubleBackwardTensors& given, const BackwardOptions& options) {
    const Differentiated how = how_differentiated(given);
    TORCH_CHECK_NOT_IMPLEMENTED(!how.forward, F::kName,
                                ": its third derivative, in forward mode, is not implemented");
    if (!how.reverse) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      return call<typename F::DoubleBackward>(given, options);
    }
    const variable_list wanted = record(differentiate_double_backward, given, options, [&] {
      return Computed{wanted_of(call<typename F::DoubleBackward>(given, options)), list_of(given)};
    });
    return gradients_from<Gradients>(wanted, options.grad_mask);
  }
};

// Registers the four operators of a family for the dispatch key of `m`.
template <class F>
void implement_derivatives(torch::Library& m) {
  implement<typename F::Forward, Derivatives<F>::forward>(m);
  implement<typename F::Backward, Derivatives<F>::backward>(m);
  implement<typename F::Jvp, Derivatives<F>::jvp>(m);
  implement<typename F::DoubleBackward, Derivatives<F>::double_backward>(m);
}

}  // namespace flash_attn_ext
