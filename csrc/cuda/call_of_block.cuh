// The call as one block sees it.
#pragma once

#include <cuda_runtime.h>

#include "../core/sequence.h"

namespace flash_attn_ext::cuda {

// That of its own sequence, if C takes packed ones. Of a tier on tensor cores those are kernels of their own: what
// differs between sequences takes registers.
template <class C, class Params>
__device__ decltype(auto) call_of_block(const Params& call, int64_t b) {
  if constexpr (C::kPacked)
    return of_sequence(call, b);
  else
    return (call);
}

}  // namespace flash_attn_ext::cuda
