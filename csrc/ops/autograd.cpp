// Autograd key: reverse mode, forward mode, and both of each other, by the table in docs/derivative_formulas.md.
//
//   X: attention's tensors    c: grad_out, grad_lse    t: the tangents of X
//   attention           F(X)         reverse: attention_backward(X, c)        forward: attention_jvp(X, t)
//   attention_backward  B(X, c)      reverse: H(X, c, t) and J(X, t)          forward: H(X, c, t) and B(X, tangents of c)
//   attention_jvp       J(X, t)      reverse: H(X, c, t) and B(X, c)          forward: third order is not implemented
//   attention_double_backward H(X, c, t): reverse to t alone, H again; nothing else is implemented
//
// The forward saves its inputs, out and lse only; what comes later recomputes the rest tile by tile.
#include <ATen/ops/add.h>
#include <torch/library.h>

#include <algorithm>

#include "autograd_lists.h"

namespace flash_attn_ext {
namespace {

using torch::autograd::AutogradContext;

constexpr size_t kTensors = std::size(AttentionTensors::kRules);

// What autograd has to see of a call: setting up a Function takes longer than attention on a few rows.
struct Differentiated {
  bool reverse = false, forward = false;
};

template <class Tensors>
Differentiated how_differentiated(const Tensors& tensors) {
  Differentiated how;
  for_each_tensor(tensors, [&](const TensorRule&, const auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (!t) return;
    how.reverse |= at::GradMode::is_enabled() && t->requires_grad();
    how.forward |= t->_fw_grad(/*level=*/0).defined();
  });
  return how;
}

// The tensors without their tangents in forward mode.
template <class Tensors>
Tensors primals_of(const Tensors& tensors) {
  Tensors primals = tensors;
  for_each_tensor(primals, [](const TensorRule&, auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (t && t->_fw_grad(/*level=*/0).defined()) optional = t->_fw_primal(/*level=*/0);
  });
  return primals;
}

OptionalTensor tangent_of(const OptionalTensor& t) {
  if (!t || !t->defined()) return std::nullopt;
  const at::Tensor& tangent = t->_fw_grad(/*level=*/0);
  return tangent.defined() && !tangent._is_zerotensor() ? OptionalTensor(tangent) : std::nullopt;
}

InputTangents tangents_of(const AttentionTensors& tensors) {
  InputTangents tangents;
#define FA_TANGENT_OF(name, ...) tangents.name = tangent_of(tensors.name);
  FA_ATTENTION_DIFFERENTIABLE(FA_TANGENT_OF)
#undef FA_TANGENT_OF
  return tangents;
}

InputTangents as_tangents(const Gradients& gradients) { return struct_of<InputTangents>(list_of(gradients)); }

void set_tangent(const at::Tensor& t, const at::Tensor& tangent) {
  if (t.defined() && tangent.defined()) t._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
}

bool any_defined(const InputTangents& tangents) {
  return std::apply([](const auto&... t) { return ((t && t->defined()) || ...); }, tangents.tie());
}

// a += b, where undefined is zero.
void add(at::Tensor& a, const at::Tensor& b) {
  if (b.defined()) a = a.defined() ? at::add(a, b) : b;
}
void add(Gradients& a, const Gradients& b) {
#define FA_ADD(name, ...) add(a.name, b.name);
  FA_ATTENTION_DIFFERENTIABLE(FA_ADD)
#undef FA_ADD
}

struct Cotangents {
  at::Tensor out, lse;
  bool any() const { return out.defined() || lse.defined(); }
};

AttentionBackwardTensors backward_tensors(const AttentionTensors& x, const at::Tensor& out,
                                          const at::Tensor& lse, const Cotangents& c) {
  AttentionBackwardTensors tensors;
  tensors.set_forward(x);
  tensors.out = out;
  tensors.lse = lse;
  tensors.grad_out = defined_or_none(c.out);
  tensors.grad_lse = defined_or_none(c.lse);
  return tensors;
}

// B(X, c); nothing where no gradient is wanted or c is zero.
Gradients backward_of(const AttentionTensors& x, const at::Tensor& out, const at::Tensor& lse,
                      const Cotangents& c, const AttentionOptions& options, const GradFlags& wanted) {
  if (!c.any() || std::find(wanted.begin(), wanted.end(), true) == wanted.end()) return {};
  AttentionBackwardOptions backward_options;
  backward_options.set_forward(options);
  backward_options.grad_mask = wanted;
  return call<AttentionBackward>(backward_tensors(x, out, lse, c), backward_options);
}

// J(X, t).
AttentionJvpResult jvp_of(const AttentionTensors& x, const InputTangents& t,
                          const AttentionOptions& options) {
  AttentionJvpTensors tensors;
  tensors.set_tangents(t);
  tensors.set_forward(x);
  return call<AttentionJvp>(tensors, options);
}

// H(X, c, t), where `moved` is J(X, t).
Gradients double_backward_of(const AttentionTensors& x, const at::Tensor& out, const at::Tensor& lse,
                             const Cotangents& c, const InputTangents& t, const AttentionJvpResult& moved,
                             const AttentionOptions& options, const GradFlags& wanted) {
  if (!c.any() || !any_defined(t) || std::find(wanted.begin(), wanted.end(), true) == wanted.end()) return {};
  AttentionDoubleBackwardTensors tensors;
  tensors.set_tangents(t);
  tensors.set_forward(x);
  tensors.grad_out = defined_or_none(c.out);
  tensors.grad_lse = defined_or_none(c.lse);
  tensors.out = out;
  tensors.lse = lse;
  tensors.tangent_out = moved.tangent_out;
  tensors.tangent_lse = moved.tangent_lse;
  AttentionBackwardOptions backward_options;
  backward_options.set_forward(options);
  backward_options.grad_mask = wanted;
  return call<AttentionDoubleBackward>(tensors, backward_options);
}

// Which of a Function's tensors need a gradient: those that were given have an edge each, in order, and those that
// were not have none.
std::vector<bool> needs_gradient(AutogradContext* ctx, const variable_list& saved, size_t count) {
  std::vector<bool> needs(count);
  size_t edge = 0;
  for (size_t n = 0; n < count; ++n) needs[n] = saved[n].defined() && ctx->needs_input_grad(edge++);
  return needs;
}

GradFlags flags_from(const std::vector<bool>& needs, size_t first) {
  GradFlags flags;
  for (size_t n = 0; n < kGradients; ++n) flags[n] = needs[first + n];
  return flags;
}

// Autograd looks for what needs a gradient among the arguments of a Function's forward, so the tensors are arguments of
// their own. They come last: the gradients of the `kOthers` before, which are none, are easy to count. What is saved is
// `given`, with the tangents of forward mode, which the arguments are without: a backward that runs in forward mode
// must find them.
constexpr size_t kOthers = 3;

variable_list gradients_of_arguments(size_t count) { return variable_list(kOthers + count); }

void put(variable_list& result, size_t first, const Gradients& gradients) {
  for (const at::Tensor& grad : list_of(gradients)) result[kOthers + first++] = grad;
}

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
  implement<Attention, attention_autograd>(m);
  implement<AttentionBackward, attention_backward_autograd>(m);
  implement<AttentionJvp, attention_jvp_autograd>(m);
  implement<AttentionDoubleBackward, attention_double_backward_autograd>(m);
}

}  // namespace flash_attn_ext
