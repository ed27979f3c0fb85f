// From Python objects to the structs of ops.h.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include "ops.h"

namespace flash_attn_ext {

// Each returns false, with no Python error set, if the object is not what the type wants.

inline bool from_python(PyObject* object, at::Tensor& t) {
  if (!THPVariable_Check(object)) return false;
  t = THPVariable_Unpack(object);
  return true;
}

inline bool from_python(PyObject* object, bool& value) {
  value = object == Py_True;
  return object == Py_True || object == Py_False;
}

inline bool from_python(PyObject* object, int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return !overflow;
}

inline bool from_python(PyObject* object, c10::SymInt& value) {
  int64_t integer = 0;
  if (!from_python(object, integer)) return false;
  value = integer;
  return true;
}

inline bool from_python(PyObject* object, double& value) {
  if (PyFloat_Check(object)) {
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  int64_t integer = 0;
  if (!from_python(object, integer)) return false;
  value = static_cast<double>(integer);
  return true;
}

template <class T>
bool from_python(PyObject* object, std::optional<T>& value) {
  if (object == Py_None) {
    value.reset();
    return true;
  }
  return from_python(object, value.emplace());
}

// All members of a struct, from as many objects.
template <class Struct>
bool all_from_python(PyObject* const* objects, Struct& to) {
  return std::apply([&](auto&... member) { return (from_python(*objects++, member) && ...); }, to.tie());
}

}  // namespace flash_attn_ext
