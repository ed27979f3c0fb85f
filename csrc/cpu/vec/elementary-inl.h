// exp, log, expm1, log1p, erf, powers, sin and cos of vectors, for functions of the user. Errors are a few ulp.
#pragma once

#include "math-inl.h"

// Calls f for each lane. For functions without a vector form.
template <class T, class F>
FA_INLINE Vec<T> each_lane(Vec<T> x, const F& f) {
  Vec<T> y = {};
  for (int i = 0; i < kLanes<T>; ++i) y[i] = f(x[i]);
  return y;
}

// base^x for log2_base = log2(base), also where it overflows. `high` is log(2^127) or log(2^1023) to this base; two
// steps compute the largest results.
template <class T>
FA_INLINE Vec<T> exp_of_any(Vec<T> x, T log2_base, T square_of_base) {
  const T high = Exp2<T>::kHighest / log2_base;
  const Vec<T> lower = x > high ? x - T(2) : x;
  const Vec<T> y = exp_scaled<T>(lower > high ? splat<T>(high) : lower, log2_base);
  return x > high ? y * square_of_base * square_of_base : y;
}

template <class T>
FA_INLINE Vec<T> any_exp(Vec<T> x) {
  constexpr double kE = 2.71828182845904523536;
  return exp_of_any<T>(x, T(kLog2E), T(kE));
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

// Returns `y`, or log(x) where log(x) is not finite.
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

template <class T>
FA_INLINE Vec<T> any_expm1(Vec<T> x) {
  return x > T(1) ? any_exp<T>(x) - T(1) : expm1<T>(x);
}

// The coefficients interpolate at Chebyshev nodes, in 40 digits. For |x| < kSmall, erf(x) / x is a polynomial in x^2.
// For kSmall <= |x| < kOne, log(1 - erf(x)) is a polynomial in (x - kCenter) / kRadius. From kOne on, erf rounds to 1.
template <class T>
struct Erf;
template <>
struct Erf<float> {
  static constexpr float kSmall = 0.9f, kOne = 4, kCenter = 0, kRadius = 1;
  static constexpr float kSmallPoly[] = {1.12837916679f,    -0.37612635194f,   0.112837180496f,
                                         -0.0268606647911f, 0.00520422669375f, -0.000817963218089f,
                                         8.52940132284e-5f};
  static constexpr float kLargePoly[] = {0.000318539662412f, -1.13023105522f,    -0.631823918106f,
                                         -0.110087166496f,   0.0264276371535f,   -0.00476262583251f,
                                         0.00059758577023f,  -4.61638586252e-5f, 1.64306365569e-6f};
};
template <>
struct Erf<double> {
  static constexpr double kSmall = 1, kOne = 6, kCenter = 3.5, kRadius = 2.5;
  static constexpr double kSmallPoly[] = {
      1.1283791670955125738,     -0.37612638903183748056,     0.11283791670954878666,
      -0.026866170645076793248,  0.0052239776248180144673,    -0.00085483269808337899052,
      0.00012055331111642710923, -0.000014925595266831181565, 1.6461000484121368033e-6,
      -1.6350312701054695011e-7, 1.4659775274047435814e-8,    -1.137284885679167367e-9,
      5.9571761477489114044e-11};
  static constexpr double kLargePoly[] = {
      -14.112437402148173761,     -18.165248970912977252,     -6.0422065921389367861,
      -0.081650909717799245498,   0.034128411079638965596,    -0.01438454833063893873,
      0.0059537044786857654998,   -0.0023739972761078476935,  0.00089357655647921243797,
      -0.00030781959505328940462, 0.000090901103641757261896, -0.000018474346905170143873,
      -1.4783966569639068386e-6,  4.5653913877192364735e-6,   -3.4196471333147523457e-6,
      1.9191466186766579829e-6,   -9.1779753326693183747e-7,  3.8251506449279392732e-7,
      -1.2867813473821390044e-7,  2.7966374245484618158e-8,   -3.0414788597569982974e-9,
      -9.6528252053603727179e-10, 4.8610991029225573585e-9,   -5.1951607385372206155e-9,
      2.19018459068510972e-9,     -3.2459019990300850308e-10};
};

template <class T, size_t kTerms>
FA_INLINE Vec<T> polynomial(const T (&terms)[kTerms], Vec<T> x) {
  Vec<T> p = splat<T>(terms[kTerms - 1]);
#pragma GCC unroll 32
  for (int k = static_cast<int>(kTerms) - 2; k >= 0; --k) p = p * x + terms[k];
  return p;
}

template <class T>
FA_INLINE Vec<T> erf(Vec<T> x) {
  using C = Erf<T>;
  const Vec<T> a = x < T(0) ? -x : x, t = a > C::kOne ? splat<T>(C::kOne) : a;
  const Vec<T> log_rest = polynomial<T>(C::kLargePoly, (t - C::kCenter) * (T(1) / C::kRadius));
  const Vec<T> large = T(1) - exp<T>(log_rest);
  return a < C::kSmall ? polynomial<T>(C::kSmallPoly, x * x) * x : x < T(0) ? -large : large;
}

// Returns |a|^b; arbitrary where |a|^b is NaN. The relative error is an ulp of double times log2 of the result.
FA_INLINE Vec<double> power_of_magnitude(Vec<double> a, Vec<double> b) {
  return exp_of_any<double>(b * log2<double>(a), 1, 2);
}
FA_INLINE Vec<float> power_of_magnitude(Vec<float> a, Vec<float> b) {
  typedef float Half __attribute__((vector_size(FA_VECTOR_BYTES / 2)));
  Half base[2], exponent[2], result[2];
  std::memcpy(base, &a, sizeof a);
  std::memcpy(exponent, &b, sizeof b);
#pragma GCC unroll 2
  for (int n = 0; n < 2; ++n)
    result[n] = __builtin_convertvector(power_of_magnitude(__builtin_convertvector(base[n], Vec<double>),
                                                           __builtin_convertvector(exponent[n], Vec<double>)),
                                        Half);
  Vec<float> y;
  std::memcpy(&y, result, sizeof y);
  return y;
}

// std::pow.
template <class T>
FA_INLINE Vec<T> power(Vec<T> a, Vec<T> b) {
  using I = VecIndex<T>;
  constexpr T kInf = std::numeric_limits<T>::infinity(), kNaN = std::numeric_limits<T>::quiet_NaN();
  const auto is_whole = [](Vec<T> x) FA_INLINE_LAMBDA {
    return x == each_lane<T>(x, [](T lane) { return std::floor(lane); });
  };
  const Vec<T> magnitude = (Vec<T>)((VecBits<T>)a << 1 >> 1);
  const I whole = is_whole(b), odd = whole & ~is_whole(b * T(0.5));
  Vec<T> y = power_of_magnitude(magnitude, b);
  y = magnitude == T(1) ? splat<T>(T(1)) : y;
  y = (((I)a < 0) & odd) ? -y : y;
  y = ((a < T(0)) & (a > -kInf) & ~whole) ? splat<T>(kNaN) : y;
  return ((b == T(0)) | (a == T(1))) ? splat<T>(T(1)) : y;
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
  constexpr T kSign = C::kTerms % 2 ? T(-1) : T(1);  // the sign of the last term
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
