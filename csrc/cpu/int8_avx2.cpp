// int8 attention with AVX2: bytes are widened to int16.
#include "int8.h"
#include "target_region.h"

#if defined(__x86_64__)
#include <immintrin.h>

// The intrinsics of isa_avx2.cpp that these kernels need.
#define FA_ISA_NAME "avx2"
#define FA_TILE_FUNCTIONS kAvx2Kernels->tile_functions
#define FA_VECTOR_BYTES 32
#define FA_VECTOR_REGISTERS 16
#define FA_WIDEN(x) (U32) _mm256_cvtepu16_epi32((__m128i)(x))
#define FA_MULTIPLY_INT16(a, b) (VecIndex<float>)_mm256_madd_epi16((__m256i)(a), (__m256i)(b))
#define FA_HAS_F16C
#define FA_CVTPH_PS(x) _mm256_cvtph_ps((__m128i)(x))
#define FA_CVTPS_PH(x) (Half16) _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

FA_TARGET_BEGIN("avx2,fma,f16c")
namespace flash_attn_ext::cpu::int8_avx2 {
#include "kernels/int8_forward-inl.h"
}  // namespace flash_attn_ext::cpu::int8_avx2
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Int8Kernels* const kInt8Avx2Kernels = &int8_avx2::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Int8Kernels* const kInt8Avx2Kernels = nullptr;
}

#endif
