#include "eager.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace flash_attn_ext {
namespace {

bool is_plain_4d(pybind11::handle object) {
  if (!THPVariable_CheckExact(object.ptr())) return false;
  const at::Tensor& t = THPVariable_Unpack(object.ptr());
  return t.layout() == at::kStrided && !t.is_nested() && t.dim() == 4;
}

bool is_plain_or_none(pybind11::handle object, bool any_dim) {
  if (object.is_none()) return true;
  if (!any_dim) return is_plain_4d(object);
  return THPVariable_CheckExact(object.ptr()) && THPVariable_Unpack(object.ptr()).layout() == at::kStrided;
}

OptionalTensor unpack_optional(pybind11::handle object) {
  return object.is_none() ? OptionalTensor() : OptionalTensor(THPVariable_Unpack(object.ptr()));
}

}  // namespace

pybind11::object attention_if_plain(pybind11::handle query, pybind11::handle key, pybind11::handle value,
                                    pybind11::handle attn_mask, pybind11::handle alibi_slopes,
                                    pybind11::handle rng_state, bool enable_gqa, FA_OPTION_ARGS) {
  if (!is_plain_4d(query) || !is_plain_4d(key) || !is_plain_4d(value) ||
      !is_plain_or_none(attn_mask, false) || !is_plain_or_none(alibi_slopes, true) ||
      !is_plain_or_none(rng_state, true) || at::impl::torch_function_mode_enabled() ||
      torch::jit::tracer::isTracing())
    return pybind11::none();
  const at::Tensor &q = THPVariable_Unpack(query.ptr()), &k = THPVariable_Unpack(key.ptr()),
                   &v = THPVariable_Unpack(value.ptr());
  const auto batch = q.size(0), heads = q.size(1);
  if (k.size(0) != batch || v.size(0) != batch || (!enable_gqa && (k.size(1) != heads || v.size(1) != heads)))
    return pybind11::none();
  ForwardResult result;
  {
    pybind11::gil_scoped_release others_may_run;
    result = call_attention(
        {q, k, v, unpack_optional(attn_mask), unpack_optional(alibi_slopes), unpack_optional(rng_state)},
        FA_OPTIONS);
  }
  return pybind11::make_tuple(
      pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::get<0>(result))),
      pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::get<1>(result))));
}

}  // namespace flash_attn_ext
