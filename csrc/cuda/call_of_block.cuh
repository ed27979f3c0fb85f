// The params of the call that one block computes.
#pragma once

#include <cuda_runtime.h>

#include "../core/sequence.h"

namespace flash_attn_ext::cuda {

// The params of sequence b, if C computes packed sequences; else the params of the call. In the tiers on tensor cores
// packed sequences have kernels of their own, because the params of a sequence take registers.
template <class C, class Params>
__device__ decltype(auto) call_of_block(const Params& call, int64_t b) {
  if constexpr (C::kPacked)
    return of_sequence(call, b);
  else
    return (call);
}

}  // namespace flash_attn_ext::cuda
