// The door between ops/ and the CUDA kernels: torch-free, like cpu/run.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "../core/params.h"

namespace flash_attn_ext::cuda {

// What the selector answers: a launcher and the bytes of device memory that it needs, or why there is none.
// A launch only enqueues; it returns the first error of doing so.
template <class Params>
struct Selection {
  size_t workspace_bytes = 0;
  cudaError_t (*launch)(const Params&, void* workspace, cudaStream_t stream) = nullptr;
  const char* reason = "";
};

// dropout_mask: kept[b][h][i][j], by the rule of core/philox.h. `sizes` needs batch, heads and the lengths.
cudaError_t launch_dropout_mask(const DropoutParams& dropout, const Sizes& sizes, bool* kept,
                                cudaStream_t stream);

}  // namespace flash_attn_ext::cuda
