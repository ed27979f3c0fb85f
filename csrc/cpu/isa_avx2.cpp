// AVX2 with FMA and F16C (Haswell and Zen onwards).
#include "target_region.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define FA_ISA_NAME "avx2"
#define FA_VECTOR_BYTES 32
#define FA_VECTOR_REGISTERS 16
#define FA_MUL_EPU32(a, b) _mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#define FA_WIDEN(x) (U32) _mm256_cvtepu16_epi32((__m128i)(x))
#define FA_WIDEN_BYTES(x) (U32) _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)(x)))
#define FA_WIDEN_SIGNED_BYTES(x) (VecIndex<float>)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)(x)))
// Words of two bytes each. Products of pairs of int16. Words of a and b alternate, in each 16 bytes: first half, second
// half.
#define FA_WIDEN_BYTES_TO_16(p) _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))
#define FA_MULTIPLY_INT16(a, b) (VecIndex<float>)_mm256_madd_epi16((__m256i)(a), (__m256i)(b))
// Products of unsigned bytes of a and signed bytes of b, added in pairs to int16.
#define FA_MULTIPLY_BYTES(a, b) _mm256_maddubs_epi16((__m256i)(a), (__m256i)(b))
#define FA_WIDEN_INT8(p) (U32) _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))
#define FA_UNPACK16_LOW(a, b) (U32) _mm256_unpacklo_epi16((__m256i)(a), (__m256i)(b))
#define FA_UNPACK16_HIGH(a, b) (U32) _mm256_unpackhi_epi16((__m256i)(a), (__m256i)(b))
// Words of a and b alternate: first half, second half.
#define FA_ZIP16_LOW(a, b) \
  (U32) _mm256_permute2x128_si256((__m256i)FA_UNPACK16_LOW(a, b), (__m256i)FA_UNPACK16_HIGH(a, b), 0x20)
#define FA_ZIP16_HIGH(a, b) \
  (U32) _mm256_permute2x128_si256((__m256i)FA_UNPACK16_LOW(a, b), (__m256i)FA_UNPACK16_HIGH(a, b), 0x31)
// In each 16 bytes: table[index & 15], and bytes of a and b alternate. FA_HALVES_TO_16_BYTES moves 8 bytes of the first and 8 of
// the second half of x to each 16 bytes.
#define FA_SHUFFLE_BYTES(table, index) _mm256_shuffle_epi8((__m256i)(table), (__m256i)(index))
#define FA_UNPACK8_LOW(a, b) _mm256_unpacklo_epi8((__m256i)(a), (__m256i)(b))
#define FA_UNPACK8_HIGH(a, b) _mm256_unpackhi_epi8((__m256i)(a), (__m256i)(b))
#define FA_HALVES_TO_16_BYTES(x) _mm256_permute4x64_epi64((__m256i)(x), 0xd8)
#define FA_BROADCAST_16_BYTES(p) _mm256_broadcast_ps((const __m128*)(p))
#define FA_HAS_F16C
#define FA_ZERO_BYTES(p)          \
  (uint32_t)_mm256_movemask_epi8( \
      _mm256_cmpeq_epi8(_mm256_loadu_si256((const __m256i*)(p)), _mm256_setzero_si256()))
#define FA_BITS_OF_64_BYTES(p) ~(uint64_t(FA_ZERO_BYTES((p) + 32)) << 32 | FA_ZERO_BYTES(p))
#define FA_CVTPH_PS(x) _mm256_cvtph_ps((__m128i)(x))
#define FA_CVTPS_PH(x) (Half16) _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

FA_TARGET_BEGIN("avx2,fma,f16c")
namespace flash_attn_ext::cpu::avx2 {
#include "kernels/table-inl.h"
}  // namespace flash_attn_ext::cpu::avx2
FA_TARGET_END

namespace flash_attn_ext::cpu {
const Kernels* const kAvx2Kernels = &avx2::kKernels;
}

#else

namespace flash_attn_ext::cpu {
const Kernels* const kAvx2Kernels = nullptr;
}

#endif
