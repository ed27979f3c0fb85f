// The short way from Python to the dispatcher.
#pragma once

#include <Python.h>

namespace flash_attn_ext {

// attention_if_plain(enable_gqa, *tensors, *options), in the order of the schema: (out, lse). It is attention for an
// ordinary eager call. None where something has to see the call first, or where the arguments have to be brought into
// the operator's form: see is_plain() in eager.cpp. Python then takes the long way, which raises the errors.
extern PyMethodDef kAttentionIfPlain;

}  // namespace flash_attn_ext
