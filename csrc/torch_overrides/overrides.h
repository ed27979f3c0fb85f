// activate(): torch's own attention operators run our kernels. Nothing here happens unless a user asks for it.
//
// Each override is a kernel that we register in the dispatcher in place of torch's, under one operator and one
// dispatch key. It looks at a call's arguments and either runs it, or says why not and hands the arguments to
// the kernel that torch had there. deactivate() takes the kernels out of the dispatcher again.
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
// Runs a call and fills in its results; or returns why it is left to torch, and does nothing. A reason is a
// string literal.
using Attempt = const char* (*)(Arguments, Results&);

const char* try_sdpa(Arguments, Results&);           // sdpa.cpp
const char* why_not_sdpa(Arguments);                 // the reason alone; nullptr: it would be taken
const char* try_flash_for_cpu(Arguments, Results&);  // flash_for_cpu.cpp
const char* try_flash_for_cpu_backward(Arguments, Results&);
const char* try_flash_attention(Arguments, Results&);  // flash_attention.cpp
const char* try_flash_attention_inplace(Arguments, Results&);
const char* try_flash_attention_backward(Arguments, Results&);
const char* try_sdpa_flash(Arguments, Results&);
const char* try_sdpa_flash_backward(Arguments, Results&);
const char* try_native_mha(Arguments, Results&);  // native_mha.cpp
const char* try_native_mha_nested(Arguments, Results&);

// Registers the overrides, or takes them out again. Calls that run meanwhile end with the kernel that they
// began with. Both may be called from any thread; the second call of the same does nothing.
void activate();
void deactivate();
bool is_active();

// How often each operator was asked for since the last reset: (operator, why it was left to torch) -> calls;
// the empty reason stands for the calls that ran our kernels.
using Counts = std::map<std::pair<std::string, std::string>, int64_t>;
Counts counts();
void reset_counts();

}  // namespace flash_attn_ext::torch_overrides
