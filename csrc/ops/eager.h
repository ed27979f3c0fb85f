// The short way from Python to the dispatcher.
#pragma once

#include <Python.h>

namespace flash_attn_ext {

// attention_if_plain(enable_gqa, *tensors, *options), in the order of the schema: (out, lse). It is attention for an
// ordinary eager call. It returns None where a mode, a subclass or a transform has to see the call, and where arguments
// do not have the operator's form yet: see is_ordinary_tensor() in eager.cpp. Python then takes the long way, which raises the errors.
extern PyMethodDef kAttentionIfPlain;

}  // namespace flash_attn_ext
