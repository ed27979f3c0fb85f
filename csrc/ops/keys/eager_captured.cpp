// Rows of captured elements, without Python's calls of torch: flash_attn_ext/flex/functions.py.
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <limits>
#include <vector>

#include "eager.h"
#include "from_python.h"
#include "ordinary.h"

namespace flash_attn_ext {
namespace {

// Whether the conversion to the row's dtype needs no check, or narrowed() makes the check.
bool is_ordinary_captured(PyObject* object, at::ScalarType dtype) {
  if (!is_dense_tensor(object)) return false;
  const at::Tensor& t = THPVariable_Unpack(object);
  const at::ScalarType own = t.scalar_type();
  return has_plain_elements(t) && (dtype != at::kInt || (own != at::kUInt32 && own != at::kUInt64));
}

// The elements of an int64 tensor as int32, in one dimension.
at::Tensor narrowed(const at::Tensor& given) {
  const at::Tensor from = given.contiguous(), to = at::empty({given.numel()}, at::kInt);
  const int64_t* const source = from.const_data_ptr<int64_t>();
  int32_t* const target = to.mutable_data_ptr<int32_t>();
  int64_t changed = 0;
  for (int64_t n = 0; n < to.numel(); ++n) {
    target[n] = static_cast<int32_t>(source[n]);
    changed |= source[n] ^ target[n];
  }
  if (changed) {
    const auto [lowest, highest] = at::aminmax(from);
    TORCH_CHECK_VALUE(false, "score_mod, mask_mod: got a captured torch.int64 tensor with elements from ",
                      lowest.item<int64_t>(), " to ", highest.item<int64_t>(),
                      "; allowed: elements of 32 bits (64 where query is float64)");
  }
  return to;
}

at::Tensor as_row(const at::Tensor& t, at::ScalarType dtype) {
  if (dtype == at::kInt && t.scalar_type() == at::kLong) return narrowed(t);
  const at::Tensor same = t.scalar_type() == dtype ? t : t.to(dtype);
  return same.dim() == 1 ? same.contiguous() : same.ravel();
}

// A sequence of tensors, and the row's dtype.
PyObject* captured_row_if_ordinary(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyTuple_Check(arguments[0]) && THPDtype_Check(arguments[1]),
                   "captured_row_if_ordinary: got other arguments than a tuple of tensors and a dtype");
  if (is_observed() || has_dispatch_mode()) Py_RETURN_NONE;
  const at::ScalarType dtype = reinterpret_cast<THPDtype*>(arguments[1])->scalar_type;
  std::vector<at::Tensor> rows;
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(arguments[0]); ++n) {
    PyObject* const object = PyTuple_GET_ITEM(arguments[0], n);
    if (!is_ordinary_captured(object, dtype)) Py_RETURN_NONE;
    rows.push_back(THPVariable_Unpack(object));
  }
  at::Tensor row;
  {
    pybind11::gil_scoped_release without_gil;
    for (at::Tensor& t : rows) t = as_row(t, dtype);
    row = rows.size() == 1 ? rows[0] : at::cat(rows);
  }
  return THPVariable_Wrap(std::move(row));
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef kCapturedRowIfOrdinary = {"captured_row_if_ordinary",
                                      reinterpret_cast<PyCFunction>(captured_row_if_ordinary), METH_FASTCALL,
                                      nullptr};

}  // namespace flash_attn_ext
