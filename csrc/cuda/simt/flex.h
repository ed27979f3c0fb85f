// Attention with functions of the user and block masks in this tier: launchers, their workspaces, and the reasons
// against a call.
#pragma once

#include "../run.h"

namespace flash_attn_ext::cuda::simt {

size_t flex_workspace(const AttentionParams& p);
size_t flex_backward_workspace(const BackwardParams& p);

// Why this tier does not run the functions of a call. Null: it does, or the call has no functions.
const char* why_not_functions(const AttentionParams& p);
const char* why_not_functions(const BackwardParams& p);

Launch<AttentionParams> flex_float32, flex_float64, flex_bfloat16, flex_float16;
Launch<BackwardParams> flex_backward_float32, flex_backward_float64, flex_backward_bfloat16,
    flex_backward_float16;

}  // namespace flash_attn_ext::cuda::simt
