// AVX-512 F, BW, DQ and VL (Skylake-X and Zen 4 onwards).
#include "target_region.h"

#if defined(__x86_64__)
#include "avx512.h"

#define FA_ISA_NAME "avx512"

FA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace flash_attn_ext::cpu::avx512 {
#include "kernels/table-inl.h"
}  // namespace flash_attn_ext::cpu::avx512
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Kernels* const kAvx512Kernels = &avx512::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Kernels* const kAvx512Kernels = nullptr;
}

#endif
