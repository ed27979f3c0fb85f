// Replaces the isa_*.cpp of the other instruction sets in the ThreadSanitizer build.
#include "cpu/run.h"

namespace flash_attn_ext::cpu {
const Kernels* const kAvx2Kernels = nullptr;
const Kernels* const kAvx512Kernels = nullptr;
const Kernels* const kAvx512Bf16Kernels = nullptr;
const Kernels* const kAmxKernels = nullptr;
const Kernels* const kNeonKernels = nullptr;
const Kernels* const kNeonBf16Kernels = nullptr;
}  // namespace flash_attn_ext::cpu
