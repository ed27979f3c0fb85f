// Converts Python objects to the structs of an operator.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/python_variable.h>

#include <array>
#include <string>

#include "../declarations/signature.h"

namespace flash_attn_ext {

// Each function returns false, without a Python error, if the object does not have the type.

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

template <size_t n>
bool from_python(PyObject* object, std::array<bool, n>& flags) {
  if (!PyList_Check(object) || PyList_GET_SIZE(object) != static_cast<Py_ssize_t>(n)) return false;
  for (size_t i = 0; i < n; ++i)
    if (!from_python(PyList_GET_ITEM(object, i), flags[i])) return false;
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

// Converts one object for each member of a struct. With a null object the member keeps its default; a required tensor
// has none.
template <class Struct>
bool all_from_python(PyObject* const* objects, Struct& to) {
  auto convert = [&](auto& member) {
    PyObject* object = *objects++;
    if (object) return from_python(object, member);
    return !std::is_same_v<std::decay_t<decltype(member)>, at::Tensor>;
  };
  return to.with_members([&](auto&... member) { return (convert(member) && ...); });
}

// Writes the values of a dictionary to `objects`, in the order of a struct's members; null if a member has no value. A key
// that is no member is an error. The references are borrowed.
template <class Struct>
void objects_by_name(PyObject* dict, PyObject** objects) {
  static const auto names = [] {
    std::array<PyObject*, kMembers<Struct>> interned;
    for (size_t n = 0; n < interned.size(); ++n)
      interned[n] = PyUnicode_InternFromString(MemberNames<Struct>::at(n));
    return interned;
  }();
  TORCH_CHECK_TYPE(PyDict_CheckExact(dict), "flash_attn_ext: internal error, got no dictionary");
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0, found = 0;
  int more = PyDict_Next(dict, &position, &key, &value);
  for (size_t n = 0; n < names.size(); ++n) {
    if (more && key == names[n]) {  // the usual case: the dictionary has the struct's order
      objects[n] = value;
      more = PyDict_Next(dict, &position, &key, &value);
    } else {
      objects[n] = PyDict_GetItem(dict, names[n]);
    }
    found += objects[n] != nullptr;
  }
  TORCH_CHECK_TYPE(found == PyDict_Size(dict), "flash_attn_ext: internal error, an unknown name in ",
                   std::string(pybind11::repr(dict)));
}

}  // namespace flash_attn_ext
