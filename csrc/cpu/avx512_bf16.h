// Intrinsics of AVX-512 BF16 and VNNI, in addition to avx512.h, for isa_avx512_bf16.cpp and isa_amx.cpp.
#pragma once

#include "avx512.h"

#define FA_DOT_BFLOAT16(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#define FA_CVTPS_BF16(x) (Half16) _mm512_cvtneps_pbh(x)
#define FA_CVTPS_BF16_2(low, high) (__m512i) _mm512_cvtne2ps_pbh(high, low)
#define FA_PERMUTE16(x, from) (U32) _mm512_permutexvar_epi16((__m512i)(from), (__m512i)(x))
// AVX-512 VNNI: all CPUs with AVX-512 BF16 have it.
#define FA_DOT_INT16(sum, a, b) \
  (VecIndex<float>)_mm512_dpwssd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b))
// Products of four unsigned bytes of a and four signed bytes of b.
#define FA_DOT_BYTES(sum, a, b) \
  (VecIndex<float>)_mm512_dpbusd_epi32((__m512i)(sum), (__m512i)(a), (__m512i)(b))
