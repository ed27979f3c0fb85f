// The door between ops/ and the CUDA kernels: torch-free, like cpu/run.h.
#pragma once

#include <cuda_runtime_api.h>

#include "../core/params.h"

namespace flash_attn_ext::cuda {

// What the selector answers: a launcher, or why there is none. A tier (simt, sm80, sm90) is one launcher.
struct Selection {
  void (*launch)(const AttentionParams&, cudaStream_t stream) = nullptr;
  const char* reason = "";
};

}  // namespace flash_attn_ext::cuda
