// The arguments of flash_attn, as Python has them, in the order of the operator.
#pragma once

#include <ATen/Context.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>

#include "../dense/attention.h"

namespace flash_attn_ext {

// An argument that the operator has, too, and its position there.
struct SameArgument {
  const char* name;
  size_t position;
};
template <class Struct>
constexpr SameArgument same_argument(const char* name) {
  return {name, position_of<Struct>(name)};
}

class FlashAttnArguments {
 public:
  // query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: the arguments of torch's SDPA.
  static constexpr size_t kPositional = 8;

  PyObject *enable_gqa, *return_lse = Py_False;
  PyObject* tensors[kMembers<AttentionTensors>];
  PyObject* options[kMembers<AttentionOptions>] = {};  // null: the operator's default

  explicit FlashAttnArguments(PyObject* const* positional) : enable_gqa(positional[7]) {
    static_assert(position_of<AttentionTensors>("query") == 0 &&
                  position_of<AttentionTensors>("attn_mask") == 3);
    std::fill(std::begin(tensors), std::end(tensors), Py_None);
    std::copy(positional, positional + 4, tensors);
    options[kDropout] = positional[4];
    options[kCausal] = positional[5];
    options[kScale] = positional[6];
    options[kDeterministic] = at::globalContext().deterministicAlgorithms() ? Py_True : Py_False;
  }

  // Reads the keyword arguments. Returns false for a call that only Python runs: one with functions, key numbers or float8, or
  // with a value that _options.py converts.
  bool read(PyObject* keywords) {
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t position = 0; PyDict_Next(keywords, &position, &name, &value);)
      if (!read(name, value)) return false;
    // As band() in _options.py. `causal` names a corner. Otherwise the diagonal is in the lower right corner.
    if (reads_diagonal_ && !has_corner_ && options[kCausal] == Py_False) options[kLowerRight] = Py_True;
    return true;
  }

 private:
  bool reads_diagonal_ = false, has_corner_ = false;

  static constexpr SameArgument kSameTensors[] = {same_argument<AttentionTensors>("sink"),
                                                  same_argument<AttentionTensors>("key_mask"),
                                                  same_argument<AttentionTensors>("rng_state")};
  static constexpr SameArgument kSameOptions[] = {
      same_argument<AttentionOptions>("softcap"), same_argument<AttentionOptions>("num_splits"),
      same_argument<AttentionOptions>("unified_max"), same_argument<AttentionOptions>("diagonal"),
      same_argument<AttentionOptions>("first_key")};
  static constexpr size_t kAlibiSlopes = position_of<AttentionTensors>("alibi_slopes"),
                          kDropout = position_of<AttentionOptions>("dropout_p"),
                          kScale = position_of<AttentionOptions>("scale"),
                          kCausal = position_of<AttentionOptions>("causal"),
                          kLowerRight = position_of<AttentionOptions>("lower_right"),
                          kWindowLeft = position_of<AttentionOptions>("window_left"),
                          kWindowRight = position_of<AttentionOptions>("window_right"),
                          kAttentionChunk = position_of<AttentionOptions>("attention_chunk"),
                          kDeterministic = position_of<AttentionOptions>("deterministic");

  // The names of arguments in a call are interned: equal names are one object.
  template <size_t n>
  static std::array<PyObject*, n> interned(const char* const (&names)[n]) {
    std::array<PyObject*, n> objects;
    std::transform(names, names + n, objects.begin(), PyUnicode_InternFromString);
    return objects;
  }
  template <size_t n>
  static std::array<PyObject*, n> interned(const SameArgument (&arguments)[n]) {
    std::array<PyObject*, n> objects;
    for (size_t i = 0; i < n; ++i) objects[i] = PyUnicode_InternFromString(arguments[i].name);
    return objects;
  }

  bool read(PyObject* name, PyObject* value) {
    static const auto same_tensors = interned(kSameTensors);
    static const auto same_options = interned(kSameOptions);
    static const auto [return_lse_name, causal, window, alibi_slopes, attention_chunk, deterministic] =
        interned({"return_lse", "causal", "window", "alibi_slopes", "attention_chunk", "deterministic"});
    if (name == return_lse_name) return set(return_lse, value);
    if (name == causal) return value == Py_None || set_corner(value);
    if (name == window) return value == Py_None || set_window(value);
    for (size_t n = 0; n < same_tensors.size(); ++n)
      if (name == same_tensors[n]) return set(tensors[kSameTensors[n].position], value);
    for (size_t n = 0; n < same_options.size(); ++n)
      if (name == same_options[n]) return set(options[kSameOptions[n].position], value);
    if (name == deterministic) return value == Py_None || set(options[kDeterministic], value);
    if (name == alibi_slopes) {
      reads_diagonal_ |= value != Py_None;
      return set(tensors[kAlibiSlopes], value);
    }
    if (name == attention_chunk) {
      if (!PyLong_CheckExact(value)) return false;
      reads_diagonal_ |= PyObject_IsTrue(value) == 1;
      return set(options[kAttentionChunk], value);
    }
    return false;
  }

  static bool set(PyObject*& to, PyObject* value) {
    to = value;
    return true;
  }
  bool set_corner(PyObject* corner) {
    if (!PyUnicode_Check(corner)) return false;
    const bool lower_right = PyUnicode_CompareWithASCIIString(corner, "lower_right") == 0;
    if (!lower_right && PyUnicode_CompareWithASCIIString(corner, "upper_left") != 0) return false;
    has_corner_ = true;
    options[kCausal] = Py_True;
    return set(options[kLowerRight], lower_right ? Py_True : Py_False);
  }
  bool set_window(PyObject* window) {
    reads_diagonal_ = true;
    if (PyLong_CheckExact(window))
      return set_side(options[kWindowLeft], window) && set_side(options[kWindowRight], window);
    return PyTuple_CheckExact(window) && PyTuple_GET_SIZE(window) == 2 &&
           set_side(options[kWindowLeft], PyTuple_GET_ITEM(window, 0)) &&
           set_side(options[kWindowRight], PyTuple_GET_ITEM(window, 1));
  }
  // None and -1 are no limit.
  static bool set_side(PyObject*& to, PyObject* side) {
    if (side != Py_None && !PyLong_CheckExact(side)) return false;
    int overflow = 0;
    const bool is_unlimited =
        side == Py_None || (PyLong_AsLongLongAndOverflow(side, &overflow) == -1 && overflow == 0);
    return set(to, is_unlimited ? Py_None : side);
  }
};

}  // namespace flash_attn_ext
