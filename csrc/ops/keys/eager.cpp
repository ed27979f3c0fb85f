#include "eager.h"

#include <torch/csrc/Exceptions.h>

#include "../autograd/autograd_calls.h"
#include "../flex/flex.h"
#include "../packed/varlen.h"
#include "flash_attn_arguments.h"
#include "from_python.h"
#include "ordinary.h"

namespace flash_attn_ext {
namespace {

// Whether the object is a torch.Tensor, no subclass, dense, with the number of dimensions of the operator. Another operator
// takes float8 tensors.
bool is_ordinary_tensor(PyObject* object, const TensorRule& rule) {
  if (object == Py_None) return true;
  if (!is_dense_tensor(object) || c10::isFloat8Type(THPVariable_Unpack(object).scalar_type())) return false;
  const int64_t dim = THPVariable_Unpack(object).dim();
  switch (rule.shape.kind) {
    case Shape::kMaybeBatched:
    case Shape::kSeedOffset:
    case Shape::kPerSequence:
    case Shape::kCheckedByOperator: return true;
    case Shape::kPackedMask: return dim != 2;  // Python adds a dimension
    default: return dim == rule.shape.count;
  }
}

// Whether no tensor needs broadcasting or padding.
bool fits(const VarlenTensors& t, bool enable_gqa) { return enable_gqa || t.query.size(1) == t.key.size(1); }
template <class Tensors>
bool fits(const Tensors& t, bool enable_gqa) {
  const auto batch = t.query.size(0), heads = t.query.size(1), heads_kv = t.key.size(1);
  const bool fit_heads = enable_gqa || (t.value.size(1) == heads_kv && (heads_kv == heads || heads_kv == 1));
  return t.key.size(0) == batch && t.value.size(0) == batch && fit_heads && t.query.size(3) > 0 &&
         t.value.size(3) > 0;
}

// Whether the caller must draw a dropout state first.
template <class Tensors, class Options>
bool needs_rng_state(const Tensors& t, const Options& options) {
  return options.dropout_p != 0.0 && !t.rng_state;
}

// The objects of a call are in the order of the operator's schema.
template <class Op>
PyObject* run_if_ordinary(PyObject* enable_gqa_object, PyObject* return_lse_object,
                          PyObject* const* tensor_objects, PyObject* const* option_objects) {
  using Tensors = typename Op::Tensors;
  using Options = typename Op::Options;
  for (size_t n = 0; n < kMembers<Tensors>; ++n)
    if (!is_ordinary_tensor(tensor_objects[n], Tensors::kRules[n])) Py_RETURN_NONE;
  const int return_lse = PyObject_IsTrue(return_lse_object);
  if (return_lse < 0) return nullptr;
  bool enable_gqa = false;
  Tensors tensors;
  Options options;
  if (!from_python(enable_gqa_object, enable_gqa) || !all_from_python(tensor_objects, tensors) ||
      !all_from_python(option_objects, options) || is_observed() || !fits(tensors, enable_gqa) ||
      needs_rng_state(tensors, options))
    Py_RETURN_NONE;
  typename Op::Result result;
  {
    pybind11::gil_scoped_release without_gil;
    result = call_with_derivatives<Op>(tensors, options);
  }
  if (!return_lse) return THPVariable_Wrap(std::move(result.out));
  PyObject* pair = PyTuple_New(2);
  if (!pair) return nullptr;
  PyTuple_SET_ITEM(pair, 0, THPVariable_Wrap(std::move(result.out)));
  PyTuple_SET_ITEM(pair, 1, THPVariable_Wrap(std::move(result.lse)));
  return pair;
}

// enable_gqa, return_lse, and each tensor and option: a dictionary takes longer than a small call.
template <class Op>
PyObject* call_if_ordinary(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kTensors = kMembers<typename Op::Tensors>, kOptions = kMembers<typename Op::Options>;
  TORCH_CHECK_TYPE(count == 2 + kTensors + kOptions, Op::kName, "_if_ordinary: got ", count,
                   " arguments; allowed: ", 2 + kTensors + kOptions);
  return run_if_ordinary<Op>(arguments[0], arguments[1], arguments + 2, arguments + 2 + kTensors);
  END_HANDLE_TH_ERRORS
}

// The positional arguments of flash_attn, and a dictionary of its keyword arguments.
PyObject* flash_attn_if_ordinary(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kCount = FlashAttnArguments::kPositional + 1;
  TORCH_CHECK_TYPE(count == kCount && PyDict_CheckExact(arguments[kCount - 1]),
                   "flash_attn_if_ordinary: internal error, got ", count, " arguments; allowed: ", kCount - 1,
                   " and a dictionary");
  FlashAttnArguments given(arguments);
  if (!given.read(arguments[kCount - 1])) Py_RETURN_NONE;
  return run_if_ordinary<Attention>(given.enable_gqa, given.return_lse, given.tensors, given.options);
  END_HANDLE_TH_ERRORS
}

}  // namespace

template <class Op>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(call_if_ordinary<Op>), METH_FASTCALL, nullptr};
}

PyMethodDef kFlashAttnIfOrdinary = {
    "flash_attn_if_ordinary", reinterpret_cast<PyCFunction>(flash_attn_if_ordinary), METH_FASTCALL, nullptr};
PyMethodDef kAttentionIfOrdinary = method<Attention>("attention_if_ordinary");
PyMethodDef kFlexIfOrdinary = method<AttentionFlex>("flex_if_ordinary");
PyMethodDef kVarlenIfOrdinary = method<AttentionVarlen>("varlen_if_ordinary");

}  // namespace flash_attn_ext
