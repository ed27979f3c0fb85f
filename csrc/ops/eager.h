// The short way from Python to the dispatcher.
#pragma once

#include <pybind11/pybind11.h>

#include "ops.h"

namespace flash_attn_ext {

// attention for an ordinary eager call: (out, lse). None where something has to see the call first, and
// torch.ops must be used: tensor subclasses, torch function modes, tracing; and where q, k and v still have
// to be brought into one form (not all 4-D, other batches, heads that broadcast).
pybind11::object attention_if_plain(pybind11::handle query, pybind11::handle key, pybind11::handle value,
                                    pybind11::handle attn_mask, pybind11::handle alibi_slopes,
                                    pybind11::handle rng_state, bool enable_gqa, FA_OPTION_ARGS);

}  // namespace flash_attn_ext
