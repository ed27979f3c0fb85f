// AVX-512 on a CPU with AVX2: a function for each intrinsic of csrc/cpu that needs AVX-512, under the name of the intrinsic.
// tools/avx512.sh has this file included first in each source, so the kernels of isa_avx512.cpp and isa_avx512_bf16.cpp run
// as they are. The compiler divides their vectors into halves. Their results are right, but their times mean nothing.
// Source: Intel's Software Developer's Manual, volume 2, "operation" of each instruction.
#pragma once

#include <immintrin.h>

#include "cpu/target_region.h"

FA_TARGET_BEGIN("avx2,fma,f16c")
namespace test::avx512 {

template <class T>
using Vector __attribute__((vector_size(64))) = T;
template <class T>
using HalfVector __attribute__((vector_size(32))) = T;
template <class T>
constexpr int kLanes = 64 / sizeof(T);

// Reads and writes single elements of a vector.
template <class T>
union Lanes {
  __m512i vector;
  T lane[kLanes<T>];
};

// Returns the vector of f(0), f(1), ...
template <class T, class F>
FA_INLINE __m512i each(F f) {
  Lanes<T> x;
  for (int n = 0; n < kLanes<T>; ++n) x.lane[n] = f(n);
  return x.vector;
}

template <class T, class X>
FA_INLINE Lanes<T> lanes(X x) {
  return {(__m512i)x};
}

// ---- loads, stores, constants -----------------------------------------------------------------------------------------
FA_INLINE __m512i load(const void* from) {
  Lanes<uint8_t> x;
  std::memcpy(&x, from, sizeof(x));
  return x.vector;
}
FA_INLINE void store(void* to, __m512i x) { std::memcpy(to, &x, sizeof(x)); }
// Elements without a bit of the mask are neither read nor written.
FA_INLINE __m512i load_bytes(uint64_t mask, const void* from) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  return each<uint8_t>([&](int n) { return mask >> n & 1 ? bytes[n] : 0; });
}
FA_INLINE void store_words(void* to, uint32_t mask, __m512i x) {
  const auto words = lanes<uint16_t>(x);
  for (int n = 0; n < 32; ++n)
    if (mask >> n & 1) static_cast<uint16_t*>(to)[n] = words.lane[n];
}
template <class T>
FA_INLINE Vector<T> set1(T x) {
  return x - Vector<T>{};
}
FA_INLINE __m512i set_quads(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g,
                            int64_t h) {
  return (__m512i)Vector<int64_t>{a, b, c, d, e, f, g, h};
}
FA_INLINE __m512 repeat_4_floats(__m128 x) {
  return (__m512)each<float>([&](int n) { return x[n % 4]; });
}

// ---- comparisons: bit n is the result for element n -----------------------------------------------------------------
template <class T, class F>
FA_INLINE uint64_t bits(F f) {
  uint64_t mask = 0;
  for (int n = 0; n < kLanes<T>; ++n) mask |= uint64_t{f(n)} << n;
  return mask;
}
template <class T>
FA_INLINE uint64_t compare(Vector<T> a, Vector<T> b, int predicate) {
  return bits<T>(
      [&](int n) { return predicate == _CMP_GT_OQ ? a[n] > b[n] : !(a[n] < b[n]); });  // else NLT_UQ
}
FA_INLINE uint64_t bytes_differ(__m512i a, __m512i b) {
  const auto x = lanes<uint8_t>(a), y = lanes<uint8_t>(b);
  return bits<uint8_t>([&](int n) { return x.lane[n] != y.lane[n]; });
}
FA_INLINE uint32_t words_share_bits(__m512i a, __m512i b) {
  const auto x = lanes<uint16_t>(a & b);
  return static_cast<uint32_t>(bits<uint16_t>([&](int n) { return x.lane[n] != 0; }));
}

// ---- moves ------------------------------------------------------------------------------------------------------------
template <class T>
FA_INLINE __m512i permute(__m512i from, __m512i x) {
  const auto index = lanes<T>(from), source = lanes<T>(x);
  return each<T>([&](int n) { return source.lane[index.lane[n] & (kLanes<T> - 1)]; });
}
template <class T>
FA_INLINE __m512i permute_two(__m512i a, __m512i from, __m512i b) {
  const auto index = lanes<T>(from), first = lanes<T>(a), second = lanes<T>(b);
  return each<T>([&](int n) {
    const int i = index.lane[n] & (kLanes<T> - 1);
    return index.lane[n] & kLanes<T> ? second.lane[i] : first.lane[i];
  });
}
FA_INLINE __m512i look_up_bytes(__m512i table, __m512i from) {
  const auto index = lanes<uint8_t>(from), source = lanes<uint8_t>(table);
  return each<uint8_t>(
      [&](int n) { return index.lane[n] & 128 ? 0 : source.lane[n / 16 * 16 + (index.lane[n] & 15)]; });
}
// Elements of a and b in turn, from the first (start 0) or the second (start 8 / sizeof(T)) half of each 16 bytes.
template <class T>
FA_INLINE __m512i alternate(__m512i a, __m512i b, int start) {
  constexpr int kPart = 16 / sizeof(T);
  const auto x = lanes<T>(a), y = lanes<T>(b);
  return each<T>([&](int n) {
    const int from = n / kPart * kPart + start + n % kPart / 2;
    return n % 2 ? y.lane[from] : x.lane[from];
  });
}
FA_INLINE __m512i choose_words(uint32_t mask, __m512i a, __m512i b) {
  const auto x = lanes<uint16_t>(a), y = lanes<uint16_t>(b);
  return each<uint16_t>([&](int n) { return mask >> n & 1 ? y.lane[n] : x.lane[n]; });
}
FA_INLINE __m512i ternary(__m512i a, __m512i b, __m512i c, int table) {
  __m512i result = {};
  for (int n = 0; n < 8; ++n)
    if (table >> n & 1) result |= (n & 4 ? a : ~a) & (n & 2 ? b : ~b) & (n & 1 ? c : ~c);
  return result;
}

// ---- conversions --------------------------------------------------------------------------------------------------------
template <class To, class From, class X>
FA_INLINE __m512i widen(X x) {
  From lane[64 / sizeof(To)];
  static_assert(sizeof(lane) == sizeof(x));
  std::memcpy(lane, &x, sizeof(lane));
  return each<To>([&](int n) { return lane[n]; });
}
FA_INLINE __m512 half_to_float(__m256i x) {
  __m256 part[2] = {_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
  return (__m512)load(part);
}
FA_INLINE __m256i float_to_half(__m512 x) {
  __m256 part[2];
  store(part, (__m512i)x);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm256_cvtps_ph(part[0], _MM_FROUND_TO_NEAREST_INT)),
                                 _mm256_cvtps_ph(part[1], _MM_FROUND_TO_NEAREST_INT), 1);
}
// The instructions of bfloat16 read and write subnormal numbers as 0, and round to nearest even.
FA_INLINE uint32_t flushed(uint32_t bits) { return (bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits; }
FA_INLINE uint16_t bfloat16_of(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 64);  // a quiet NaN
  bits = flushed(bits);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
FA_INLINE __m256bh float_to_bfloat16(__m512 x) {
  const auto from = lanes<uint32_t>(x);
  uint16_t to[16];
  for (int n = 0; n < 16; ++n) to[n] = bfloat16_of(from.lane[n]);
  __m256bh result;
  std::memcpy(&result, to, sizeof(to));
  return result;
}
FA_INLINE __m512bh two_to_bfloat16(__m512 high, __m512 low) {
  const auto first = lanes<uint32_t>(low), second = lanes<uint32_t>(high);
  return (__m512bh)each<uint16_t>(
      [&](int n) { return bfloat16_of(n < 16 ? first.lane[n] : second.lane[n - 16]); });
}

// ---- arithmetic -------------------------------------------------------------------------------------------------------
FA_INLINE __m512i multiply_low_halves(__m512i a, __m512i b) {
  const auto x = (Vector<uint64_t>)a, y = (Vector<uint64_t>)b;
  return (__m512i)((x & 0xffffffffu) * (y & 0xffffffffu));
}
// x minus the nearest integer (mode 0) or the next one below (mode 1). 0 for an infinity.
template <class T>
FA_INLINE Vector<T> minus_integer(Vector<T> x, int mode) {
  Vector<T> result;
  for (int n = 0; n < kLanes<T>; ++n) {
    const T rounded = mode == 0 ? std::nearbyint(x[n]) : std::floor(x[n]);
    result[n] = std::isinf(x[n]) ? T(0) : x[n] - rounded;
  }
  return result;
}
// y * 2^floor(n), and 0 where the mask has no bit. Two factors: 2^floor(n) alone may be no number of T.
template <class T>
FA_INLINE Vector<T> scaled(uint64_t mask, Vector<T> y, Vector<T> n) {
  Vector<T> result;
  for (int i = 0; i < kLanes<T>; ++i) {
    const T limit = 4 * std::numeric_limits<T>::max_exponent;
    const int power = n[i] != n[i] ? 0
                                   : static_cast<int>(std::floor(n[i] < -limit  ? -limit
                                                                 : n[i] > limit ? limit
                                                                                : n[i]));
    result[i] = mask >> i & 1 ? (n[i] != n[i] ? n[i] : std::scalbn(y[i], power)) : T(0);
  }
  return result;
}
// Sums of products of two elements of 16 bits.
FA_INLINE __m512 dot_bfloat16(__m512 sum, __m512bh a, __m512bh b) {
  const auto x = (Vector<uint32_t>)a, y = (Vector<uint32_t>)b;
  const auto flush = [](Vector<uint32_t> bits) {
    return (Vector<float>)((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
  };
  const auto add = [&](Vector<float> total, Vector<uint32_t> left, Vector<uint32_t> right) {
    const Vector<float> l = flush(left), r = flush(right);
    Vector<float> result;
    for (int n = 0; n < 16; ++n) result[n] = std::fma(l[n], r[n], total[n]);
    return flush((Vector<uint32_t>)result);
  };
  const Vector<float> odd = add(flush((Vector<uint32_t>)sum), x & 0xffff0000u, y & 0xffff0000u);
  return (__m512)add(odd, x << 16, y << 16);
}
FA_INLINE __m512i dot_int16(__m512i sum, __m512i a, __m512i b) {
  const auto s = lanes<uint32_t>(sum);
  const auto x = lanes<int16_t>(a), y = lanes<int16_t>(b);
  return each<uint32_t>([&](int n) {
    return s.lane[n] + static_cast<uint32_t>(x.lane[2 * n] * y.lane[2 * n]) +
           static_cast<uint32_t>(x.lane[2 * n + 1] * y.lane[2 * n + 1]);
  });
}
// Products of four unsigned bytes of a and four signed bytes of b.
FA_INLINE __m512i dot_bytes(__m512i sum, __m512i a, __m512i b) {
  const auto s = lanes<int32_t>(sum);
  const auto x = lanes<uint8_t>(a);
  const auto y = lanes<int8_t>(b);
  return each<int32_t>([&](int n) {
    int32_t total = s.lane[n];
    for (int i = 4 * n; i < 4 * n + 4; ++i) total += x.lane[i] * y.lane[i];
    return total;
  });
}

}  // namespace test::avx512
FA_TARGET_END

// The features of every target region.
#undef FA_TARGET_BEGIN
#define FA_TARGET_BEGIN(features) FA_PRAGMA(GCC push_options) FA_PRAGMA(GCC target("avx2,fma,f16c"))

#define _mm512_loadu_si512(from) test::avx512::load(from)
#define _mm512_storeu_si512(to, x) test::avx512::store(to, x)
#define _mm512_maskz_loadu_epi8(mask, from) test::avx512::load_bytes(mask, from)
#define _mm512_mask_storeu_epi16(to, mask, x) test::avx512::store_words(to, mask, x)
#define _mm512_setzero_si512() \
  __m512i {}
#define _mm512_set1_epi8(x) (__m512i) test::avx512::set1<int8_t>(x)
#define _mm512_set1_epi16(x) (__m512i) test::avx512::set1<int16_t>(x)
#define _mm512_set1_ps(x) (__m512) test::avx512::set1<float>(x)
#define _mm512_set1_pd(x) (__m512d) test::avx512::set1<double>(x)
#undef _mm512_setr_epi64
#define _mm512_setr_epi64(...) test::avx512::set_quads(__VA_ARGS__)
#define _mm512_broadcast_f32x4(x) test::avx512::repeat_4_floats(x)
#define _mm512_cmp_ps_mask(a, b, predicate) test::avx512::compare<float>(a, b, predicate)
#define _mm512_cmp_pd_mask(a, b, predicate) test::avx512::compare<double>(a, b, predicate)
#define _mm512_cmpneq_epi8_mask(a, b) test::avx512::bytes_differ(a, b)
#define _mm512_test_epi16_mask(a, b) test::avx512::words_share_bits(a, b)
#define _mm512_permutexvar_epi64(from, x) test::avx512::permute<uint64_t>(from, x)
#define _mm512_permutexvar_epi16(from, x) test::avx512::permute<uint16_t>(from, x)
#define _mm512_permutex2var_epi16(a, from, b) test::avx512::permute_two<uint16_t>(a, from, b)
#define _mm512_permutex2var_epi8(a, from, b) test::avx512::permute_two<uint8_t>(a, from, b)
#define _mm512_shuffle_epi8(table, from) test::avx512::look_up_bytes(table, from)
#define _mm512_unpacklo_epi8(a, b) test::avx512::alternate<uint8_t>(a, b, 0)
#define _mm512_unpackhi_epi8(a, b) test::avx512::alternate<uint8_t>(a, b, 8)
#define _mm512_unpacklo_epi16(a, b) test::avx512::alternate<uint16_t>(a, b, 0)
#define _mm512_unpackhi_epi16(a, b) test::avx512::alternate<uint16_t>(a, b, 4)
#define _mm512_mask_blend_epi16(mask, a, b) test::avx512::choose_words(mask, a, b)
#define _mm512_ternarylogic_epi64(a, b, c, table) test::avx512::ternary(a, b, c, table)
#define _mm512_cvtepu16_epi32(x) test::avx512::widen<uint32_t, uint16_t>(x)
#define _mm512_cvtepu8_epi32(x) test::avx512::widen<uint32_t, uint8_t>(x)
#define _mm512_cvtepi8_epi32(x) test::avx512::widen<int32_t, int8_t>(x)
#define _mm512_cvtepu8_epi16(x) test::avx512::widen<uint16_t, uint8_t>(x)
#define _mm512_cvtepi8_epi16(x) test::avx512::widen<int16_t, int8_t>(x)
#define _mm512_cvtph_ps(x) test::avx512::half_to_float(x)
#define _mm512_cvtps_ph(x, rounding) test::avx512::float_to_half(x)
#define _mm512_cvtneps_pbh(x) test::avx512::float_to_bfloat16(x)
#define _mm512_cvtne2ps_pbh(high, low) test::avx512::two_to_bfloat16(high, low)
#define _mm512_mul_epu32(a, b) test::avx512::multiply_low_halves(a, b)
#define _mm512_reduce_ps(x, mode) (__m512) test::avx512::minus_integer<float>(x, mode)
#define _mm512_reduce_pd(x, mode) (__m512d) test::avx512::minus_integer<double>(x, mode)
#define _mm512_maskz_scalef_ps(mask, y, n) (__m512) test::avx512::scaled<float>(mask, y, n)
#define _mm512_maskz_scalef_pd(mask, y, n) (__m512d) test::avx512::scaled<double>(mask, y, n)
#define _mm512_dpbf16_ps(sum, a, b) test::avx512::dot_bfloat16(sum, a, b)
#define _mm512_dpwssd_epi32(sum, a, b) test::avx512::dot_int16(sum, a, b)
#define _mm512_dpbusd_epi32(sum, a, b) test::avx512::dot_bytes(sum, a, b)
// Pairs of int16: a sum of 0.
#define _mm512_madd_epi16(a, b) test::avx512::dot_int16(__m512i{}, a, b)
#define __builtin_cpu_supports(name) true  // select.cpp, int8.cpp, widen_float8.cpp
#define FA_EMULATED_AVX512
