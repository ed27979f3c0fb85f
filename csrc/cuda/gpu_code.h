// The GPUs for which this build has code.
#pragma once

namespace flash_attn_ext::cuda {

// The architectures that setup.py gave to nvcc, as "compute_80,sm_80,sm_90a".
const char* gpu_code();

// Whether a GPU of this compute capability (10 * major + minor) can run code of this build for compute capability
// `least` or later.
bool has_code_for(int capability, int least);

// Whether the build has code for 9.0a, with wgmma and setmaxnreg. Code for 9.0 lacks these instructions.
bool has_code_for_9_0a();

}  // namespace flash_attn_ext::cuda
