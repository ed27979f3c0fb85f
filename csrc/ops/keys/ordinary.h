// Which calls from Python may go to an operator directly: eager calls of ordinary tensors.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace flash_attn_ext {

// Whether the object is a torch.Tensor, no subclass, and dense.
inline bool is_dense_tensor(PyObject* object) {
  if (!THPVariable_CheckExact(object)) return false;
  const at::Tensor& t = THPVariable_Unpack(object);
  return t.layout() == at::kStrided && !t.is_nested();
}

// Whether a function mode, a torch.func transform or the tracer must see the call.
inline bool is_observed() {
  return at::impl::torch_function_mode_enabled() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::jit::tracer::isTracing();
}

inline bool needs_derivative(const at::Tensor& t) {
  return (at::GradMode::is_enabled() && t.requires_grad()) || t._fw_grad(/*level=*/0).defined();
}

// Whether a mode must see the operators, too. Code that reads or writes elements itself runs without modes.
inline bool has_dispatch_mode() { return c10::impl::dispatch_mode_enabled(); }

// Whether the memory holds the tensor's elements. It does not for a lazy negation or conjugate, zeros without memory, and a
// tensor of functionalization: the dispatcher converts them.
inline bool has_plain_elements(const at::Tensor& t) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kConverted({DispatchKey::Negative, DispatchKey::Conjugate,
                                            DispatchKey::ZeroTensor, DispatchKey::Functionalize,
                                            DispatchKey::Python});
  return t.is_cpu() && !t.key_set().has_any(kConverted);
}

}  // namespace flash_attn_ext
