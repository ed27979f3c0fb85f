// The AVX-512 intrinsics under the names that vec/ uses, for isa_avx512.cpp and avx512_bf16.h.
#pragma once

#include <immintrin.h>

#if !defined(__clang__)  // GCC 12 warns about its own _mm512_undefined_ps
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define FA_VECTOR_BYTES 64
#define FA_VECTOR_REGISTERS 32
#define FA_MUL_EPU32(a, b) _mm512_mul_epu32((__m512i)(a), (__m512i)(b))
// FRACTION: x minus the nearest integer, 0 for an infinity; ABOVE_FLOOR: x - floor(x). SCALEF: y * 2^floor(n), but 0 if
// x < lowest.
#define FA_HAS_SCALEF
#define FA_ANY_ABOVE_PS(x, limit) (_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0)
#define FA_FRACTION_PS(x) _mm512_reduce_ps(x, 0)
#define FA_FRACTION_PD(x) _mm512_reduce_pd(x, 0)
#define FA_ABOVE_FLOOR_PS(x) _mm512_reduce_ps(x, 1)
#define FA_SCALEF_PS(y, n, x, lowest) \
  _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(lowest), _CMP_NLT_UQ), y, n)
#define FA_SCALEF_PD(y, n, x, lowest) \
  _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, _mm512_set1_pd(lowest), _CMP_NLT_UQ), y, n)
#define FA_WIDEN(x) (U32) _mm512_cvtepu16_epi32((__m256i)(x))
#define FA_WIDEN_BYTES(x) (U32) _mm512_cvtepu8_epi32((__m128i)(x))
#define FA_WIDEN_SIGNED_BYTES(x) (VecIndex<float>)_mm512_cvtepi8_epi32((__m128i)(x))
#define FA_BROADCAST_16_BYTES(p) _mm512_broadcast_f32x4(_mm_loadu_ps((const float*)(p)))
// 16 bytes from p on, then 16 bytes from q on.
#define FA_TWO_16_BYTES(p, q)                                                           \
  _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)(p))), \
                          _mm_loadu_si128((const __m128i*)(q)), 1)
#define FA_HAS_F16C
#define FA_BITS_OF_64_BYTES(p) _mm512_cmpneq_epi8_mask(_mm512_loadu_si512(p), _mm512_setzero_si512())
#define FA_CVTPH_PS(x) _mm512_cvtph_ps((__m256i)(x))
#define FA_CVTPS_PH(x) (Half16) _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define FA_WIDEN_BYTES_TO_16(p) _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))
// Products of pairs of int16. Words of a and b alternate, in each 16 bytes: first half, second half.
#define FA_MULTIPLY_INT16(a, b) (VecIndex<float>)_mm512_madd_epi16((__m512i)(a), (__m512i)(b))
#define FA_WIDEN_INT8(p) (U32) _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))
#define FA_UNPACK16_LOW(a, b) (U32) _mm512_unpacklo_epi16((__m512i)(a), (__m512i)(b))
#define FA_UNPACK16_HIGH(a, b) (U32) _mm512_unpackhi_epi16((__m512i)(a), (__m512i)(b))
#define FA_PERMUTE16_2(a, b, from) \
  (U32) _mm512_permutex2var_epi16((__m512i)(a), (__m512i)(from), (__m512i)(b))
// In each 16 bytes: table[index & 15], and bytes of a and b alternate. FA_HALVES_TO_16_BYTES moves 8 bytes of the first and 8 of
// the second half of x to each 16 bytes.
#define FA_SHUFFLE_BYTES(table, index) _mm512_shuffle_epi8((__m512i)(table), (__m512i)(index))
#define FA_UNPACK8_LOW(a, b) _mm512_unpacklo_epi8((__m512i)(a), (__m512i)(b))
#define FA_UNPACK8_HIGH(a, b) _mm512_unpackhi_epi8((__m512i)(a), (__m512i)(b))
#define FA_HALVES_TO_16_BYTES(x) \
  _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), (__m512i)(x))
// table[from & 127] for a table of 128 words. One permutation looks up 64 of them.
#define FA_LOOKUP_128(table, from)                                                                     \
  _mm512_mask_blend_epi16(_mm512_test_epi16_mask((__m512i)(from), _mm512_set1_epi16(64)),              \
                          _mm512_permutex2var_epi16(_mm512_loadu_si512(table), (__m512i)(from),        \
                                                    _mm512_loadu_si512((table) + 32)),                 \
                          _mm512_permutex2var_epi16(_mm512_loadu_si512((table) + 64), (__m512i)(from), \
                                                    _mm512_loadu_si512((table) + 96)))
