// Any CPU: 128-bit vectors of the compiler's baseline (SSE2 on x86-64, NEON on ARM).
#include "target_region.h"

#define FA_ISA_NAME "generic"
#define FA_VECTOR_BYTES 16
#if defined(__aarch64__)
#define FA_VECTOR_REGISTERS 32
#else
#define FA_VECTOR_REGISTERS 16
#endif

namespace flash_attn_ext::cpu::generic {
#include "kernels/table-inl.h"
}  // namespace flash_attn_ext::cpu::generic

namespace flash_attn_ext::cpu {
const Kernels* const kGenericKernels = &generic::kKernels;
}
