// log, expm1, log1p, erf, sin and cos of vectors, for functions of the user. Errors are a few ulp.
#pragma once

#include "math-inl.h"

// Applies f to each lane, one call for each. For functions without a vector form.
template <class T, class F>
FA_INLINE Vec<T> each_lane(Vec<T> x, const F& f) {
  Vec<T> y = {};
  for (int i = 0; i < kLanes<T>; ++i) y[i] = f(x[i]);
  return y;
}

template <class T>
struct Log;
template <>
struct Log<float> {
  static constexpr uint32_t kSqrtHalf = 0x3f3504f3;      // bits of sqrt(1/2)
  static constexpr double kLn2High = 45426.0 / 65536.0;  // times any exponent exact
  static constexpr int kTerms = 5;
  static constexpr float kSmallestNormal = 1.17549435e-38f;
};
template <>
struct Log<double> {
  static constexpr uint64_t kSqrtHalf = 0x3fe6a09e667f3bcd;
  static constexpr double kLn2High = 2977044471.0 / 4294967296.0;
  static constexpr int kTerms = 11;
  static constexpr double kSmallestNormal = 2.2250738585072014e-308;
};

// log(x) = log(m) + e log(2), for positive finite x = m 2^e with m from sqrt(1/2) to sqrt(2).
template <class T>
FA_INLINE void split_log(Vec<T> x, Vec<T>& mantissa, Vec<T>& exponent) {
  using I = VecIndex<T>;
  using U = VecBits<T>;
  constexpr int kBits = Exp2<T>::kMantissaBits;
  constexpr T kUp = T(uint64_t{1} << (kBits + 1));  // makes subnormal numbers normal
  const I tiny = x < Log<T>::kSmallestNormal;
  const U bits = (U)(tiny ? x * kUp : x);
  const I e = (I)(bits - Log<T>::kSqrtHalf) >> kBits;
  mantissa = (Vec<T>)(bits - ((U)e << kBits));
  exponent = __builtin_convertvector(e, Vec<T>) - (tiny ? splat<T>(T(kBits + 1)) : Vec<T>{});
}

// log(m) = f - (f^2 / 2 - r), f = m - 1. With s = f / (2 + f), log(m) = 2s (1 + s^2 / 3 + s^4 / 5 + ...). Returns r, which is
// small.
template <class T>
FA_INLINE Vec<T> log_remainder(Vec<T> f, Vec<T> half_square) {
  const Vec<T> s = f / (f + T(2)), s2 = s * s;
  constexpr int kTerms = Log<T>::kTerms;
  Vec<T> p = splat<T>(T(2.0 / (2 * kTerms + 1)));
#pragma GCC unroll 16
  for (int k = kTerms - 1; k >= 1; --k) p = p * s2 + T(2.0 / (2 * k + 1));
  return s * (half_square + p * s2);
}

// `y`, except where log is not finite.
template <class T>
FA_INLINE Vec<T> log_of_any(Vec<T> x, Vec<T> y) {
  constexpr T kInf = std::numeric_limits<T>::infinity(), kNaN = std::numeric_limits<T>::quiet_NaN();
  y = x == T(0) ? splat<T>(-kInf) : y;
  y = x < T(0) ? splat<T>(kNaN) : y;
  return ((x == kInf) | (x != x)) ? x : y;
}

template <class T>
FA_INLINE Vec<T> log(Vec<T> x) {
  Vec<T> m, e;
  split_log<T>(x, m, e);
  const Vec<T> f = m - T(1), half_square = f * f * T(0.5);
  const Vec<T> r = log_remainder<T>(f, half_square) + e * T(kLn2 - Log<T>::kLn2High);
  return log_of_any<T>(x, e * T(Log<T>::kLn2High) - ((half_square - r) - f));
}

// Exact for powers of 2.
template <class T>
FA_INLINE Vec<T> log2(Vec<T> x) {
  Vec<T> m, e;
  split_log<T>(x, m, e);
  const Vec<T> f = m - T(1), half_square = f * f * T(0.5);
  const Vec<T> log_m = f - (half_square - log_remainder<T>(f, half_square));
  return log_of_any<T>(x, log_m * T(kLog2E) + e);
}

// log(1 + x), with the rounding of 1 + x corrected.
template <class T>
FA_INLINE Vec<T> log1p(Vec<T> x) {
  const Vec<T> u = x + T(1);
  const Vec<T> y = log<T>(u);
  const Vec<T> corrected = y - ((u - T(1)) - x) / u;
  return ((u == T(0)) | (u == std::numeric_limits<T>::infinity())) ? y : corrected;
}

// For x up to 87 (709). Larger x give a large finite number.
template <class T>
FA_INLINE Vec<T> expm1(Vec<T> x) {
  constexpr T kLowest = T(sizeof(T) == 4 ? -24 : -48), kHighest = T(Exp2<T>::kHighest * kLn2);
  const Vec<T> y = x < kLowest ? splat<T>(kLowest) : x > kHighest ? splat<T>(kHighest) : x;
  Vec<T> power, fraction;
  split_exp<T>(y, T(kLog2E), power, fraction);
  return power * fraction + (power - T(1));
}

// The coefficients interpolate erf(x) / x as a polynomial in x^2, and log(1 - erf(x)), at Chebyshev nodes in 40 digits.
inline constexpr float kErfSmall[] = {1.12837916679f,    -0.37612635194f,   0.112837180496f,
                                      -0.0268606647911f, 0.00520422669375f, -0.000817963218089f,
                                      8.52940132284e-5f};
inline constexpr float kErfLarge[] = {0.000318539662412f, -1.13023105522f,    -0.631823918106f,
                                      -0.110087166496f,   0.0264276371535f,   -0.00476262583251f,
                                      0.00059758577023f,  -4.61638586252e-5f, 1.64306365569e-6f};

template <class T>
FA_INLINE Vec<T> erf(Vec<T> x) {
  if constexpr (sizeof(T) == 8) {
    return each_lane<T>(x, [](T lane) { return std::erf(lane); });
  } else {
    constexpr T kSmall = T(0.9), kOne = T(4);  // from 4 on, erf rounds to 1
    const Vec<T> a = x < T(0) ? -x : x, t = a > kOne ? splat<T>(kOne) : a, s = x * x;
    Vec<T> p = splat<T>(kErfSmall[6]), q = splat<T>(kErfLarge[8]);
#pragma GCC unroll 8
    for (int k = 5; k >= 0; --k) p = p * s + kErfSmall[k];
#pragma GCC unroll 8
    for (int k = 7; k >= 0; --k) q = q * t + kErfLarge[k];
    const Vec<T> large = T(1) - exp<T>(q);
    return a < kSmall ? p * x : x < T(0) ? -large : large;
  }
}

template <class T>
struct Trigonometric;
template <>
struct Trigonometric<float> {
  // pi / 2 as a sum. The first two parts times a number of quarter turns up to kLargest are exact.
  static constexpr float kParts[] = {1.5703125f, 4.83751297e-4f, 7.54978995e-8f};
  static constexpr float kLargest = 8192.0f;
  static constexpr int kTerms = 4;
};
template <>
struct Trigonometric<double> {
  static constexpr double kParts[] = {1.5707962512969971, 7.5497894158615964e-8, 5.3903028581581191e-15};
  static constexpr double kLargest = 33554432.0;
  static constexpr int kTerms = 8;
};

constexpr double inverse_factorial(int n) { return n < 2 ? 1.0 : inverse_factorial(n - 1) / n; }

// sin(x + turns * pi / 2), for |x| up to kLargest, by the Taylor series of sin and cos on [-pi/4, pi/4].
template <class T>
FA_INLINE Vec<T> sine_of_small(Vec<T> x, int turns) {
  using C = Trigonometric<T>;
  using U = VecBits<T>;
  constexpr double kTwoOverPi = 0.63661977236758134308;
  const Vec<T> shifted = x * T(kTwoOverPi) + Exp2<T>::kRound, n = shifted - Exp2<T>::kRound;
  const Vec<T> y = ((x - n * C::kParts[0]) - n * C::kParts[1]) - n * C::kParts[2], z = y * y;
  const U quarter = (U)shifted + static_cast<unsigned>(turns);
  constexpr T kSign = C::kTerms % 2 ? T(-1) : T(1);  // of the last term
  Vec<T> sine = splat<T>(kSign * T(inverse_factorial(2 * C::kTerms + 1)));
  Vec<T> cosine = splat<T>(-kSign * T(inverse_factorial(2 * C::kTerms + 2)));
#pragma GCC unroll 8
  for (int k = C::kTerms - 1; k >= 1; --k) {
    const T sign = k % 2 ? T(-1) : T(1);
    sine = sine * z + sign * T(inverse_factorial(2 * k + 1));
    cosine = cosine * z - sign * T(inverse_factorial(2 * k + 2));
  }
  sine = sine * z * y + y;
  cosine = cosine * z * z + (T(1) - z * T(0.5));
  const Vec<T> result = (quarter & 1) != U{} ? cosine : sine;
  return (quarter & 2) != U{} ? -result : result;
}

template <class T>
FA_INLINE bool any_large_angle(Vec<T> x) {
  bool any = false;
  for (int i = 0; i < kLanes<T>; ++i) any |= !(std::abs(x[i]) <= Trigonometric<T>::kLargest);
  return any;
}

template <class T>
FA_INLINE Vec<T> sine(Vec<T> x) {
  if (any_large_angle<T>(x)) return each_lane<T>(x, [](T lane) { return std::sin(lane); });
  return sine_of_small<T>(x, 0);
}

template <class T>
FA_INLINE Vec<T> cosine(Vec<T> x) {
  if (any_large_angle<T>(x)) return each_lane<T>(x, [](T lane) { return std::cos(lane); });
  return sine_of_small<T>(x, 1);
}
