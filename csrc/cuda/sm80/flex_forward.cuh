// Forward with functions of the user and block masks: the kernel of forward.cuh, on the tiles that the block mask shows.
#pragma once

#include "flex_functions.cuh"
#include "forward.cuh"

namespace flash_attn_ext::cuda::sm80 {

// Three kernels for all calls, packed or not.
template <class In>
cudaError_t launch_flex_forward(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  auto* const device = static_cast<simt::DeviceFunctions*>(workspace);
  const int64_t widest = std::max(p.sizes.head_dim, p.sizes.head_dim_v);
  const WithFunctions functions{device};
  return in_order([&] { return simt::launch_store_functions(p, device, stream); },
                  [&] {
                    if (widest <= 64) return launch_padded<Config<In, 64, 64, 2, true>>(p, stream, functions);
                    if (widest <= 128)
                      return launch_padded<Config<In, 128, 64, 2, true>>(p, stream, functions);
                    return launch_padded<Config<In, 256, 16, 2, true>>(p, stream, functions);
                  });
}

}  // namespace flash_attn_ext::cuda::sm80
