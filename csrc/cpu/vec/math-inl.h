// exp and tanh of vectors. Polynomials were fitted by interpolation of (2^f - 1) / f at Chebyshev nodes of
// [-1/2, 1/2] in 60 digits. The absolute error of 2^f is below 4e-9 (float) and 7e-18 (double)
// before rounding.
#pragma once

#include "vec-inl.h"

constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

template <class T>
struct Exp2;

template <>
struct Exp2<float> {
  static constexpr float kPoly[] = {0.693147188026f,   0.240226507606f,   0.0555035711422f,
                                    0.00961808255728f, 0.00133908633665f, 0.000154531629451f};
  static constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves round(x) in the low bits
  static constexpr float kLowest = -126.0f, kHighest = 127.0f;  // exponents of normal numbers
  static constexpr float kLowestProb = -100.0f;
  static constexpr int kMantissaBits = 23;
  static constexpr uint32_t kOne = 127u << 23;
};

template <>
struct Exp2<double> {
  static constexpr double kPoly[] = {
      0.69314718055994530942,   0.2402265069591009822,     0.055504108664821594339,  0.0096181291076068885273,
      0.001333355814641693531,  0.00015403530441736050155, 1.5252733829836118394e-5, 1.3215442587921689653e-6,
      1.0178062445845773521e-7, 7.0725859492692236999e-9,  4.4549605981865183938e-10};
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLowest = -1022.0, kHighest = 1023.0;
  static constexpr double kLowestProb = -900.0;
  static constexpr int kMantissaBits = 52;
  static constexpr uint64_t kOne = uint64_t{1023} << 52;
};

// Returns (2^f - 1) / f for f in [-1/2, 1/2].
template <class T>
FA_INLINE Vec<T> exp2_polynomial(Vec<T> f) {
  using C = Exp2<T>;
  constexpr int kTerms = sizeof(C::kPoly) / sizeof(T);
  Vec<T> p = splat<T>(C::kPoly[kTerms - 1]);
#pragma GCC unroll 16
  for (int i = kTerms - 2; i >= 0; --i) p = p * f + C::kPoly[i];
  return p;
}

// Splits e^(scale x) - 1 = power * fraction + (power - 1), power = 2^n, for log2_scale = scale * log2(e). x
// log2_scale must be in [kLowest, kHighest] or NaN. With an FMA, neither sum rounds its product first.
template <class T>
FA_INLINE void split_exp(Vec<T> x, T log2_scale, Vec<T>& power, Vec<T>& fraction) {
  using C = Exp2<T>;
  const Vec<T> shifted = x * log2_scale + C::kRound;
  const Vec<T> f = x * log2_scale - (shifted - C::kRound);
  const VecBits<T> bits = ((VecBits<T>)shifted << C::kMantissaBits) + C::kOne;
  power = (Vec<T>)bits;
  fraction = exp2_polynomial<T>(f) * f;
}

// exp for probabilities of 16-bit types. The relative error is below 2.7e-6 (2^-18.5). It is 700 times less than half an
// ulp of bfloat16 and 90 times less than half an ulp of float16. Minimax polynomials of degree 4 by Remez' exchange.
constexpr float kShortExp2Nearest[] = {0.9999992847442627f, 0.6931217908859253f, 0.240247443318367f,
                                       0.05591785907745361f, 0.009570102207362652f};  // f in [-1/2, 1/2]
constexpr float kShortExp2AboveFloor[] = {1.0000026226043701f, 0.6930038332939148f, 0.2414427548646927f,
                                          0.052011460065841675f, 0.013534167781472206f};  // f in [0, 1]

FA_INLINE Vec<float> short_polynomial(const float (&terms)[5], Vec<float> f) {
  Vec<float> p = splat<float>(terms[4]);
#pragma GCC unroll 4
  for (int i = 3; i >= 0; --i) p = p * f + terms[i];
  return p;
}

// exp_scaled() returns e^(scale x) for log2_scale = scale * log2(e), for results up to 2^127 (2^1023). -inf gives 0,
// NaN stays NaN. Results below 2^lowest become 0.
//
// No result is subnormal, because CPUs of Intel take 100 cycles and more for a multiply-add with a subnormal number, and
// peaked scores would make many of them. For gradients `lowest` is kLowestProb, because P times a difference of dP may be
// subnormal, too.

#if defined(FA_HAS_SCALEF)

// 2^y with the error of a short polynomial of f = y - floor(y): FA_SCALEF_PS itself rounds its exponent down.
FA_INLINE Vec<float> short_exp2(Vec<float> y, float lowest = Exp2<float>::kLowest) {
  return FA_SCALEF_PS(short_polynomial(kShortExp2AboveFloor, FA_ABOVE_FLOOR_PS(y)), y, y, lowest);
}

// As exp_scaled(), with the error of a short polynomial.
FA_INLINE Vec<float> short_exp_scaled(Vec<float> x, float log2_scale, float lowest = Exp2<float>::kLowest) {
  return short_exp2(x * log2_scale, lowest);
}

// One instruction subtracts the nearest integer, also from an infinity. Another instruction multiplies by 2^n.
template <class T>
FA_INLINE Vec<T> exp_scaled(Vec<T> x, T log2_scale, T lowest = Exp2<T>::kLowest) {
  const Vec<T> y = x * log2_scale;
  if constexpr (sizeof(T) == 4) {
    const Vec<T> f = FA_FRACTION_PS(y);
    return FA_SCALEF_PS(exp2_polynomial<T>(f) * f + T(1), y - f, y, lowest);
  } else {
    const Vec<T> f = FA_FRACTION_PD(y);
    return FA_SCALEF_PD(exp2_polynomial<T>(f) * f + T(1), y - f, y, lowest);
  }
}

#else

template <class T>
FA_INLINE Vec<T> exp_scaled(Vec<T> x, T log2_scale, T lowest = Exp2<T>::kLowest) {
  const VecIndex<T> tiny = x < lowest / log2_scale;
  Vec<T> power, fraction;
  split_exp<T>(tiny ? Vec<T>{} : x, log2_scale, power, fraction);
  const Vec<T> y = power * fraction + power;
  return tiny ? Vec<T>{} : y;
}

// As exp_scaled(), with the error of a short polynomial.
FA_INLINE Vec<float> short_exp_scaled(Vec<float> x, float log2_scale, float lowest = Exp2<float>::kLowest) {
  using C = Exp2<float>;
  const VecIndex<float> tiny = x < lowest / log2_scale;
  const Vec<float> in_range = tiny ? Vec<float>{} : x;
  const Vec<float> shifted = in_range * log2_scale + C::kRound;
  const Vec<float> f = in_range * log2_scale - (shifted - C::kRound);
  const Vec<float> power = (Vec<float>)(((VecBits<float>)shifted << C::kMantissaBits) + C::kOne);
  const Vec<float> y = power * short_polynomial(kShortExp2Nearest, f);
  return tiny ? Vec<float>{} : y;
}

#endif

template <class T>
FA_INLINE Vec<T> exp(Vec<T> x, T lowest = Exp2<T>::kLowest) {
  return exp_scaled<T>(x, T(kLog2E), lowest);
}

// e^(scale x) for P, if q, k, v have type In: only as exact as the use of P requires. log2_scale = scale * log2(e).
template <class In, class T>
FA_INLINE Vec<T> prob_exp(Vec<T> x, T log2_scale, T lowest = Exp2<T>::kLowest) {
  if constexpr (sizeof(In) == 2) {
    return short_exp_scaled(x, log2_scale, lowest);
  } else {
    return exp_scaled<T>(x, log2_scale, lowest);
  }
}

// Computes tanh by expm1. The error is a few ulp, also near 0. With e = exp(2|x|) - 1: tanh|x| = e / (e + 2).
template <class T>
FA_INLINE Vec<T> tanh(Vec<T> x) {
  constexpr T kSaturated = T(sizeof(T) == 4 ? 24 : 48);  // e^-24 (e^-48) is far below half an ulp of 1
  Vec<T> y = x < T(0) ? x * T(-2) : x * T(2);
  y = y > kSaturated ? splat<T>(kSaturated) : y;
  Vec<T> power, fraction;
  split_exp<T>(y, T(kLog2E), power, fraction);
  const Vec<T> e = power * fraction + (power - T(1));
  const Vec<T> t = e / (e + T(2));
  return x < T(0) ? -t : t;
}
