// Rows of captured elements, without Python's calls of torch: flash_attn_ext/flex/functions.py.
#include <ATen/ops/aminmax.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "eager.h"
#include "from_python.h"
#include "ordinary.h"

namespace flash_attn_ext {
namespace {

// Whether torch converts the elements to `dtype` without a loss, or copy_int64() checks the conversion.
bool is_ordinary_captured(PyObject* object, at::ScalarType dtype) {
  if (!is_dense_tensor(object)) return false;
  const at::Tensor& t = THPVariable_Unpack(object);
  const at::ScalarType own = t.scalar_type();
  return has_plain_elements(t) && (dtype != at::kInt || (own != at::kUInt32 && own != at::kUInt64));
}

// The tensors with these positions in a list. Returns false if one of them is not ordinary.
bool read_tensors(PyObject* list, PyObject* positions, at::ScalarType dtype,
                  std::vector<at::Tensor>& tensors) {
  for (Py_ssize_t n = 0; n < PyTuple_GET_SIZE(positions); ++n) {
    PyObject* const object = PyList_GetItem(list, PyLong_AsSsize_t(PyTuple_GET_ITEM(positions, n)));
    if (!object) throw python_error();
    if (!is_ordinary_captured(object, dtype)) return false;
    tensors.push_back(THPVariable_Unpack(object));
  }
  return true;
}

// Throws ValueError if an element does not fit.
void copy_int64(const at::Tensor& from, int32_t* to) {
  const int64_t* const source = from.const_data_ptr<int64_t>();
  const int64_t count = from.numel();
  int64_t changed_bits = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t wide = source[n];
    const auto narrow = static_cast<int32_t>(wide);
    to[n] = narrow;
    changed_bits |= wide ^ narrow;
  }
  if (!changed_bits) return;
  const auto [lowest, highest] = at::aminmax(from);
  TORCH_CHECK_VALUE(false, "score_mod, mask_mod: got a captured torch.int64 tensor with elements from ",
                    lowest.item<int64_t>(), " to ", highest.item<int64_t>(),
                    "; allowed: elements of 32 bits (64 where query is float64)");
}

// All elements in one dimension, with derivatives.
at::Tensor row_of(const std::vector<at::Tensor>& tensors, at::ScalarType dtype) {
  const bool is_one = tensors.size() == 1 && tensors[0].scalar_type() == dtype;
  if (is_one ||
      std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) { return needs_derivative(t); })) {
    std::vector<at::Tensor> rows;
    for (const at::Tensor& t : tensors) rows.push_back(t.to(dtype).ravel());
    return rows.size() == 1 ? rows[0] : at::cat(rows);
  }
  int64_t count = 0;
  for (const at::Tensor& t : tensors) count += t.numel();
  at::Tensor row = at::empty({count}, dtype);
  auto* to = static_cast<std::byte*>(row.mutable_data_ptr());
  for (const at::Tensor& t : tensors) {
    if (dtype == at::kInt && t.scalar_type() == at::kLong) {
      copy_int64(t.contiguous(), reinterpret_cast<int32_t*>(to));
    } else if (t.numel() > 0) {
      const at::Tensor same = t.to(dtype).contiguous();
      std::memcpy(to, same.const_data_ptr(), same.nbytes());
    }
    to += t.numel() * row.element_size();
  }
  return row;
}

PyObject* captured_rows_if_ordinary(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const bool has_types = count == 4 && PyList_Check(arguments[0]) && PyTuple_Check(arguments[1]) &&
                         PyTuple_Check(arguments[2]) && THPDtype_Check(arguments[3]);
  TORCH_CHECK_TYPE(has_types,
                   "captured_rows_if_ordinary: got other arguments than a list, two tuples and a dtype");
  const at::ScalarType floats = reinterpret_cast<THPDtype*>(arguments[3])->scalar_type;
  const at::ScalarType dtypes[] = {floats, floats == at::kDouble ? at::kLong : at::kInt};
  std::vector<at::Tensor> tensors[2];
  if (is_observed() || has_dispatch_mode()) Py_RETURN_NONE;
  for (int n = 0; n < 2; ++n)
    if (!read_tensors(arguments[0], arguments[1 + n], dtypes[n], tensors[n])) Py_RETURN_NONE;
  at::Tensor rows[2];
  {
    pybind11::gil_scoped_release without_gil;
    for (int n = 0; n < 2; ++n)
      if (!tensors[n].empty()) rows[n] = row_of(tensors[n], dtypes[n]);
  }
  PyObject* const pair = PyTuple_New(2);
  if (!pair) throw python_error();
  for (int n = 0; n < 2; ++n) PyTuple_SET_ITEM(pair, n, THPVariable_Wrap(std::move(rows[n])));
  return pair;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef kCapturedRowsIfOrdinary = {"captured_rows_if_ordinary",
                                       reinterpret_cast<PyCFunction>(captured_rows_if_ordinary),
                                       METH_FASTCALL, nullptr};

}  // namespace flash_attn_ext
