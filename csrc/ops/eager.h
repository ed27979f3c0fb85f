// The short way from Python to the dispatcher.
#pragma once

#include <Python.h>

namespace flash_attn_ext {

// attention_if_ordinary(enable_gqa, return_lse, tensors, options): out or (out, lse). Tensors and options are dictionaries, by the names of
// the schema. It is attention for an ordinary eager call. It returns None where a mode, a subclass or a transform has to
// see the call, and where arguments do not have the operator's form yet: see is_ordinary_tensor() in eager.cpp. Python
// then goes the long way, which raises the errors.
extern PyMethodDef kAttentionIfOrdinary;

}  // namespace flash_attn_ext
