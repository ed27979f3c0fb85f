// The interface of the CUDA kernels for ops/: without torch, like cpu/run.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <vector>

#include "../core/params.h"

namespace flash_attn_ext::cuda {

// Enqueues work; returns the first error of a launch.
template <class Params>
using Launch = cudaError_t(const Params&, void* workspace, cudaStream_t stream);

// The selector's answer: the launcher of a tier and its bytes of device memory, or the reason why no tier can run the
// call.
template <class Params>
struct Selection {
  const char* tier = "";
  size_t workspace_bytes = 0;
  Launch<Params>* launch = nullptr;
  std::string reason;                // why no tier can run the call; empty if a tier can
  std::vector<std::string> why_not;  // why each faster tier does not run it, the fastest first
};

// Writes dropout_mask, kept[b][h][i][j], as core/philox.h defines. `sizes` needs batch, heads and the lengths; i
// counts from first_row.
cudaError_t launch_dropout_mask(const DropoutParams& dropout, const Sizes& sizes, int64_t first_row,
                                bool* kept, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda
