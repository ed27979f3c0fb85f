// NEON, which every 64-bit ARM CPU has. Intrinsics are for instructions that compilers do not generate: conversions of
// float16 and of bytes, and of a bool mask to bits.
#include "target_region.h"

#if defined(__aarch64__)
#include "neon.h"

#define FA_ISA_NAME "neon"

namespace flash_attn_ext::cpu::neon {
#include "kernels/table-inl.h"
}  // namespace flash_attn_ext::cpu::neon

namespace flash_attn_ext::cpu {
const Kernels* const kNeonKernels = &neon::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Kernels* const kNeonKernels = nullptr;
}

#endif
