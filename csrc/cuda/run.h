// What ops/ calls of the CUDA kernels: without torch, like cpu/run.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <vector>

#include "../core/params.h"

namespace flash_attn_ext::cuda {

// A launch only enqueues; it returns the first error of doing so.
template <class Params>
using Launch = cudaError_t(const Params&, void* workspace, cudaStream_t stream);

// What the selector answers: the tier's launcher and the bytes of device memory that it needs, or why there
// is none.
template <class Params>
struct Selection {
  const char* tier = "";
  size_t workspace_bytes = 0;
  Launch<Params>* launch = nullptr;
  std::string reason;                // why nothing can run the call; empty if something does
  std::vector<std::string> why_not;  // why each faster tier does not run it, the fastest first
};

// dropout_mask: kept[b][h][i][j], by the rule of core/philox.h. `sizes` needs batch, heads and the lengths;
// i counts from first_row.
cudaError_t launch_dropout_mask(const DropoutParams& dropout, const Sizes& sizes, int64_t first_row,
                                bool* kept, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda
