// Times the two products of decode for caches of 8 and 4 bits on data in L1, for AVX2 and 4 queries a key head: bounds for a call, which
// also reads memory, computes the softmax and loads scales. Prints ns a key of 128 columns.
//
//   g++ -O3 -march=haswell benchmarks/bare_products_of_codes.cpp -o build/bare_products_of_codes && build/bare_products_of_codes
//
// int8 and int4 are multiplied as int16 (decode_integer_columns-inl.h, decode_integer_lanes-inl.h), and sums stay in registers, as there.
// float8_e4m3fn becomes float32 in registers (decode_float8-inl.h), with and without the search for NaN.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "shortest.h"

constexpr int kColumns = 128, kRows = 4, L = 8;  // L: lanes of 32 bits

alignas(64) int8_t codes[kKeys * kColumns];
alignas(64) int16_t queries[kRows * kColumns];          // [vectors of 16 columns][kRows][16]
alignas(64) float float_queries[kRows * kColumns];      // [vectors of 8 columns][kRows][8]
alignas(64) int32_t pairs_of_probs[kKeys / 2 * kRows];  // two int16
alignas(64) float probs[kKeys * kRows], sums[kRows * kColumns];

inline __m256i load_bytes(const int8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline __m256i load_words(const int16_t* from) {
  __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  asm("" : "+x"(words));  // one load for several products
  return words;
}
inline __m256i multiply_add(__m256i sum, __m256i a, __m256i b) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
  asm("" : "+x"(sum));  // the compiler may add integers in another order, and store sums in memory
  return sum;
}
inline __m256 multiply_add(__m256 sum, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sum); }

// A vector or two of a key, 16 columns each.
struct Int8Key {
  static constexpr int kVectors = 1, kBytes = 16;
  static void load(const int8_t* from, __m256i* to) { to[0] = load_bytes(from); }
};
struct Int4Key {
  static constexpr int kVectors = 2, kBytes = 16;
  static void load(const int8_t* from, __m256i* to) {
    const __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    to[0] = _mm256_and_si256(bytes, _mm256_set1_epi16(15));
    to[1] = _mm256_srli_epi16(bytes, 4);
  }
};
// 16 columns of two values, as pairs across the values. kParts: the passes that read the same bytes.
struct Int8Values {
  static constexpr int kBytes = 16, kBytesOfRow = kColumns, kParts = 1;
  template <int>
  static void load(const int8_t* from, __m256i* to) {
    const __m256i first = load_bytes(from), second = load_bytes(from + kBytesOfRow);
    to[0] = _mm256_unpacklo_epi16(first, second);
    to[1] = _mm256_unpackhi_epi16(first, second);
  }
};
struct Int4Values {
  static constexpr int kBytes = 32, kBytesOfRow = kColumns / 2, kParts = 4;
  template <int kPart>
  static void load(const int8_t* from, __m256i* to) {
    const auto load_all = [](const int8_t* p) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    };
    const __m256i first = load_all(from), second = load_all(from + kBytesOfRow),
                  both =
                      kPart < 2 ? _mm256_unpacklo_epi8(first, second) : _mm256_unpackhi_epi8(first, second),
                  words =
                      kPart % 2 == 0 ? _mm256_unpacklo_epi8(both, both) : _mm256_unpackhi_epi8(both, both);
    to[0] = _mm256_and_si256(words, _mm256_set1_epi16(15));
    to[1] = _mm256_srli_epi16(words, 12);
  }
};

template <class V, class Reduce>
inline void store_sums(const V (&sum)[2 * kRows], float* to, const Reduce& add) {
  const auto halve = [&](V a, V b) {
    const __m256 x = (__m256)a, y = (__m256)b;
    return add((V)_mm256_shuffle_ps(x, y, 0x88), (V)_mm256_shuffle_ps(x, y, 0xdd));
  };
  const V a = halve(halve(sum[0], sum[1]), halve(sum[2], sum[3])),
          b = halve(halve(sum[4], sum[5]), halve(sum[6], sum[7]));
  const V all = add((V)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x20),
                    (V)_mm256_permute2f128_ps((__m256)a, (__m256)b, 0x31));
  _mm256_storeu_ps(to, (__m256)all);
}

// S^T, two keys at once.
template <class Key>
__attribute__((noinline)) void score_integers() {
  constexpr int kBytesOfRow = kColumns / Key::kVectors;
  for (int j = 0; j < kKeys; j += 2) {
    __m256i sum[2 * kRows] = {};
    const int16_t* q = queries;
#pragma GCC unroll 2
    for (int c = 0; c < kBytesOfRow; c += Key::kBytes) {
      __m256i key[2][Key::kVectors];
      for (int n = 0; n < 2; ++n) Key::load(codes + (j + n) * kBytesOfRow + c, key[n]);
#pragma GCC unroll 8
      for (int i = 0; i < Key::kVectors * kRows; ++i, q += 2 * L) {
        const __m256i query = load_words(q);
        for (int n = 0; n < 2; ++n)
          sum[n * kRows + i % kRows] = multiply_add(sum[n * kRows + i % kRows], key[n][i / kRows], query);
      }
    }
    store_sums(sum, probs + j * kRows, [](__m256i a, __m256i b) { return _mm256_add_epi32(a, b); });
  }
}

// O += P V, 16 columns in a pass. The sums of int4 are not in the order of the columns.
template <class Values, int kPart>
inline void add_part(const int8_t* from, float* to) {
  __m256i sum[kRows][2] = {};
  const int32_t* p = pairs_of_probs;
#pragma GCC unroll 4
  for (int j = 0; j < kKeys; j += 2, from += 2 * Values::kBytesOfRow, p += kRows) {
    __m256i value[2];
    Values::template load<kPart>(from, value);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const __m256i prob = _mm256_set1_epi32(p[r]);
      for (int n = 0; n < 2; ++n) sum[r][n] = multiply_add(sum[r][n], prob, value[n]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int n = 0; n < 2; ++n) {
      float* out = to + r * kColumns + n * L;
      _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), _mm256_cvtepi32_ps(sum[r][n])));
    }
}
template <class Values>
__attribute__((noinline)) void add_integers() {
  const int8_t* from = codes;
  float* to = sums;
  for (int n = 0; n < Values::kBytesOfRow / Values::kBytes; ++n, from += Values::kBytes) {
    add_part<Values, 0>(from, to);
    if constexpr (Values::kParts == 4) {
      add_part<Values, 1>(from, to + 2 * L);
      add_part<Values, 2>(from, to + 4 * L);
      add_part<Values, 3>(from, to + 6 * L);
    }
    to += Values::kParts * 2 * L;
  }
}

// The even and the odd columns of 16 codes of float8_e4m3fn, times 2^-120.
template <bool kSearchesNaN>
inline void widen_float8(const int8_t* from, __m256* to, __m256i& highest) {
  const __m256i words = _mm256_and_si256(_mm256_slli_epi16(load_bytes(from), 4),
                                         _mm256_set1_epi16(static_cast<int16_t>(0x87f0)));
  if (kSearchesNaN) highest = _mm256_max_epu16(highest, _mm256_add_epi16(words, words));
  to[0] = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  to[1] = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

template <bool kSearchesNaN>
__attribute__((noinline)) bool score_float8() {
  __m256i highest = {};
  for (int j = 0; j < kKeys; j += 2) {
    __m256 sum[2 * kRows] = {};
    const float* q = float_queries;
    for (int c = 0; c < kColumns; c += 2 * L) {
      __m256 key[2][2];
      for (int n = 0; n < 2; ++n) widen_float8<kSearchesNaN>(codes + (j + n) * kColumns + c, key[n], highest);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kRows; ++i, q += L) {
        __m256 query = _mm256_loadu_ps(q);
        asm("" : "+x"(query));
        for (int n = 0; n < 2; ++n)
          sum[n * kRows + i % kRows] = multiply_add(sum[n * kRows + i % kRows], query, key[n][i / kRows]);
      }
    }
    store_sums(sum, probs + j * kRows, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });
  }
  return !_mm256_testz_si256(highest, _mm256_set1_epi16(1));
}

template <bool kSearchesNaN>
__attribute__((noinline)) bool add_float8() {
  __m256i highest = {};
  for (int c = 0; c < kColumns; c += 2 * L) {
    __m256 sum[kRows][2] = {};
#pragma GCC unroll 8
    for (int j = 0; j < kKeys; ++j) {
      __m256 value[2];
      widen_float8<kSearchesNaN>(codes + j * kColumns + c, value, highest);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const __m256 prob = _mm256_broadcast_ss(probs + j * kRows + r);
        for (int n = 0; n < 2; ++n) sum[r][n] = multiply_add(sum[r][n], prob, value[n]);
      }
    }
    for (int r = 0; r < kRows; ++r)
      for (int n = 0; n < 2; ++n) {
        float* to = sums + r * kColumns + c + n * L;
        _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), sum[r][n]));
      }
  }
  return !_mm256_testz_si256(highest, _mm256_set1_epi16(1));
}

int main() {
  std::fill(codes, codes + kKeys * kColumns, int8_t{1});
  const auto print = [](const char* name, double scores, double values) {
    std::printf("%-26s S %5.1f, P V %5.1f, together %5.1f ns a key\n", name, scores, values, scores + values);
  };
  print("int8", shortest(score_integers<Int8Key>), shortest(add_integers<Int8Values>));
  print("int4, one scale", shortest(score_integers<Int4Key>), shortest(add_integers<Int4Values>));
  print("e4m3", shortest(score_float8<true>), shortest(add_float8<true>));
  print("e4m3, no search for NaN", shortest(score_float8<false>), shortest(add_float8<false>));
}
