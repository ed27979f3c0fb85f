// Which GPUs this build has code for.
#pragma once

namespace flash_attn_ext::cuda {

// What nvcc was asked for by setup.py, as "compute_80,sm_80,sm_90a".
const char* gpu_code();

// Whether a GPU of this compute capability (10 * major + minor) can run any of it.
bool has_code_for(int capability);

// Whether it has the instructions that only 9.0a names: wgmma, setmaxnreg. Code for 9.0 lacks them.
bool has_code_for_9_0a();

}  // namespace flash_attn_ext::cuda
