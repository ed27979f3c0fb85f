// The params of the call that one block computes.
#pragma once

#include <cuda_runtime.h>

#include "../core/sequence.h"

namespace flash_attn_ext::cuda {

// Returns the params of sequence b if C computes packed sequences, otherwise the params of the call. The tiers on
// tensor cores have separate kernels for packed sequences, because the params of a sequence need registers.
template <class C, class Params>
__device__ decltype(auto) call_of_block(const Params& call, int64_t b) {
  if constexpr (C::kPacked)
    return of_sequence(call, b);
  else
    return (call);
}

}  // namespace flash_attn_ext::cuda
