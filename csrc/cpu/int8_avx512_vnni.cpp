// int8 attention with AVX512-VNNI (Cascade Lake, Ice Lake and Zen 4 onwards).
#include "int8.h"
#include "target_region.h"

#if defined(__x86_64__)
#include "avx512.h"

#define FA_ISA_NAME "avx512_vnni"
#define FA_TILE_FUNCTIONS kAvx512Kernels->tile_functions
// Sums of four products of bytes, unsigned in a and signed in b, and of two products of int16.
#define FA_DOT_INT8_WORDS(sum, a, b) (Sums32) _mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b))
#define FA_DOT_INT16_WORDS(sum, a, b) (Sums32) _mm512_dpwssd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b))

FA_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
namespace flash_attn_ext::cpu::int8_avx512_vnni {
#include "kernels/int8_forward-inl.h"
}  // namespace flash_attn_ext::cpu::int8_avx512_vnni
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Int8Kernels* const kInt8VnniKernels = &int8_avx512_vnni::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Int8Kernels* const kInt8VnniKernels = nullptr;
}

#endif
