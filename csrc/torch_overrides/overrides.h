// activate(): torch's own attention operators run our kernels. Importing the package activates nothing.
//
// An override is a kernel that replaces torch's kernel in the dispatcher, for one operator and one dispatch key. It
// checks the arguments of a call. It runs the call, or counts the reason why not and calls torch's kernel.
// deactivate() removes the overrides from the dispatcher.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKey.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace flash_attn_ext::torch_overrides {

using Arguments = c10::ArrayRef<c10::IValue>;  // in the order of the operator's schema
using Results = std::vector<c10::IValue>;
// Each function runs a call and sets its results, or returns the reason why torch must run it. A reason is a
// string literal.
using Attempt = const char* (*)(Arguments, Results&);

const char* try_sdpa(Arguments, Results&);           // sdpa.cpp
const char* why_not_sdpa(Arguments);                 // only the reason; nullptr: try_sdpa() runs the call
const char* try_flash_for_cpu(Arguments, Results&);  // flash_for_cpu.cpp
const char* try_flash_for_cpu_backward(Arguments, Results&);
const char* try_flash_attention(Arguments, Results&);  // flash_attention.cpp
const char* try_flash_attention_inplace(Arguments, Results&);
const char* try_flash_attention_backward(Arguments, Results&);
const char* try_sdpa_flash(Arguments, Results&);
const char* try_sdpa_flash_backward(Arguments, Results&);
const char* try_native_mha(Arguments, Results&);  // native_mha.cpp
const char* try_native_mha_nested(Arguments, Results&);

// Registers or removes the overrides. A call that is running ends with the kernel that it began with. Any thread may
// call both functions. A second call of the same function does nothing.
void activate();
void deactivate();
bool is_active();

// The number of calls since the last reset: (operator, reason why torch ran it) -> calls. The empty reason counts the
// calls that ran our kernels.
using Counts = std::map<std::pair<std::string, std::string>, int64_t>;
Counts counts();
void reset_counts();

}  // namespace flash_attn_ext::torch_overrides
