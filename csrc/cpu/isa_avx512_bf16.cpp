// AVX-512 with its bfloat16 dot product (Cooper Lake, Sapphire Rapids, Zen 4 onwards): products of bfloat16
// inputs run on the inputs themselves; every other dtype as in isa_avx512.cpp.
#include "target_region.h"

#if defined(__x86_64__)
#include "avx512.h"

#define FA_ISA_NAME "avx512_bf16"
#define FA_DOT_BFLOAT16(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#define FA_CVTPS_BF16(x) (Half16) _mm512_cvtneps_pbh(x)
#define FA_CVTPS_BF16_2(low, high) (__m512i) _mm512_cvtne2ps_pbh(high, low)
#define FA_PERMUTE16(x, from) (U32) _mm512_permutexvar_epi16((__m512i)(from), x)
#define FA_PERMUTE16_2(a, b, from) \
  (U32) _mm512_permutex2var_epi16((__m512i)(a), (__m512i)(from), (__m512i)(b))

FA_TARGET_BEGIN("avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace flash_attn_ext::cpu::avx512_bf16 {
#include "kernels/table-inl.h"
}  // namespace flash_attn_ext::cpu::avx512_bf16
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Kernels* const kAvx512Bf16Kernels = &avx512_bf16::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Kernels* const kAvx512Bf16Kernels = nullptr;
}

#endif
