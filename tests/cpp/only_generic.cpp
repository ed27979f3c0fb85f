// Stands for isa_avx2.cpp and isa_avx512.cpp in the ThreadSanitizer build.
#include "cpu/run.h"

namespace flash_attn_ext::cpu {
const Kernels* const kAvx2Kernels = nullptr;
const Kernels* const kAvx512Kernels = nullptr;
}  // namespace flash_attn_ext::cpu
