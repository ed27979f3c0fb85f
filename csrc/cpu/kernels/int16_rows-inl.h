// Rows rounded to int16, for products on integers. Each row has the unit u = (its largest magnitude) / 32767. This is
// finer than bfloat16 for values above 1/256 of the row's largest.
#pragma once

#include "../vec/pair-inl.h"

typedef VecIndex<float> S32;

constexpr float kLargestInt16 = 32767;

// Returns the largest magnitude of a row of whole vectors. Magnitudes compare like their bits. Inf and NaN compare above all finite
// numbers.
template <class In>
FA_INLINE float largest_magnitude(const In* row, int64_t cols) {
  constexpr int L = kLanes<float>;
  S32 highest = {};
  const auto take = [&](S32 x) FA_INLINE_LAMBDA { highest = x > highest ? x : highest; };
  for (int64_t c = 0; c < cols; c += L) take((S32)load_columns<float>(row + c, L) & 0x7fffffff);
#pragma GCC unroll 8
  for (int d = L / 2; d > 0; d /= 2) take((S32)rotate<float>((F32)highest, d));
  return ((F32)highest)[0];
}

// Rounds a row to int16: its largest magnitude becomes `whole`. The row has whole vectors, padded with zeros. Returns
// the unit of the rounded numbers: NaN if an element is not finite.
inline float round_row(const float* row, int64_t lanes, float whole, int16_t* to) {
  constexpr int L = kLanes<float>;
  constexpr float kToWhole = 0x1.8p23f;  // adding it rounds to an integer in the low bits
  const float largest = largest_magnitude(row, lanes);
  if (!(largest > 0 && largest <= std::numeric_limits<float>::max())) {
    std::fill(to, to + lanes, int16_t{0});
    return largest == 0 ? 0.0f : std::numeric_limits<float>::quiet_NaN();
  }
  // The inverse of the smallest subnormals is Inf. Then round the row to 0.
  const float inverse = std::min(whole / largest, std::numeric_limits<float>::max());
  for (int64_t c = 0; c < lanes; c += L)
    *reinterpret_cast<UnalignedHalf16*>(to + c) = narrow((U32)(load<float>(row + c) * inverse + kToWhole));
  return 1.0f / inverse;
}
