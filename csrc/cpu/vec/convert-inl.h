// Reading float, double, bfloat16 and float16 as the accumulator type, and rounding back (to nearest even).
// The 16-bit conversions are integer arithmetic on vectors. If the ISA has F16C, its instructions replace two of them.
#pragma once

#include "vec-inl.h"

// A vector of kLanes<float> 16-bit values.
typedef uint16_t Half16 __attribute__((vector_size(FA_VECTOR_BYTES / 2)));
typedef uint16_t UnalignedHalf16 __attribute__((vector_size(FA_VECTOR_BYTES / 2), aligned(2), may_alias));
using F32 = Vec<float>;
using U32 = VecBits<float>;

#if defined(FA_WIDEN)  // GCC 12 would split the vector into two halves
FA_INLINE U32 widen(Half16 x) { return FA_WIDEN(x); }
#else
FA_INLINE U32 widen(Half16 x) { return __builtin_convertvector(x, U32); }
#endif
FA_INLINE Half16 narrow(U32 x) { return __builtin_convertvector(x, Half16); }

FA_INLINE F32 to_float(Half16 x, BFloat16) { return (F32)(widen(x) << 16); }

#if defined(FA_CVTPS_BF16)
FA_INLINE Half16 from_float(F32 x, BFloat16) { return FA_CVTPS_BF16(x); }
#else
FA_INLINE Half16 from_float(F32 x, BFloat16) {
  const U32 bits = (U32)x;
  const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32 nan = (bits >> 16) | 0x40u;  // a quiet NaN, so that rounding cannot make it an infinity
  return narrow(x != x ? nan : rounded);
}
#endif

#if defined(FA_HAS_F16C)

FA_INLINE F32 to_float(Half16 x, Float16) { return FA_CVTPH_PS(x); }
FA_INLINE Half16 from_float(F32 x, Float16) { return FA_CVTPS_PH(x); }

#else

FA_INLINE F32 to_float(Half16 x, Float16) {
  const U32 h = widen(x);
  const U32 magnitude = (h & 0x7fffu) << 13;       // exponent and mantissa at their positions in a float
  const U32 normal = magnitude + (112u << 23);     // exponent bias 15 -> 127
  const U32 special = magnitude + (224u << 23);    // infinity and NaN: exponent 31 -> 255
  const F32 hidden = (F32)(U32{} + (113u << 23));  // 2^-14
  const U32 subnormal = (U32)((F32)(magnitude + (113u << 23)) - hidden);
  U32 r = magnitude >= (31u << 23) ? special : normal;
  r = magnitude < (1u << 23) ? subnormal : r;
  return (F32)(r | ((h & 0x8000u) << 16));
}

FA_INLINE Half16 from_float(F32 x, Float16) {
  const U32 bits = (U32)x, magnitude = bits & 0x7fffffffu;
  const U32 normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  const F32 half = splat(0.5f);  // has an ulp of 2^-24, the smallest float16: the addition rounds
  const U32 subnormal = (U32)((F32)magnitude + half) - (U32)half;
  U32 r = magnitude < (113u << 23) ? subnormal : normal;
  r = magnitude >= 0x477ff000u ? U32{} + 0x7c00u : r;  // 65520 and above round to infinity
  r = magnitude > 0x7f800000u ? U32{} + 0x7e00u : r;   // NaN
  return narrow(r | ((bits >> 16) & 0x8000u));
}

#endif

// load_as<In, T> reads kLanes<T> values of In at p as T. store_as is its inverse.
template <class In, class T>
FA_INLINE Vec<T> load_as(const In* p) {
  if constexpr (std::is_same_v<In, T>) {
    return load<T>(p);
  } else {
    return to_float(*reinterpret_cast<const UnalignedHalf16*>(p), In{});
  }
}

template <class Out, class T>
FA_INLINE void store_as(Out* p, Vec<T> x) {
  if constexpr (std::is_same_v<Out, T>) {
    store<T>(p, x);
  } else {
    *reinterpret_cast<UnalignedHalf16*>(p) = from_float(x, Out{});
  }
}

// The same for the n < kLanes<T> values at the end of a row. Missing lanes read 0.
template <class In, class T>
FA_INLINE Vec<T> load_tail_as(const In* p, int64_t n) {
  In buffer[kLanes<T>] = {};
  std::memcpy(buffer, p, n * sizeof(In));
  return load_as<In, T>(buffer);
}

// Reads the first n values, at most a whole vector.
template <class T, class In>
FA_INLINE Vec<T> load_columns(const In* p, int64_t n) {
  return n >= kLanes<T> ? load_as<In, T>(p) : load_tail_as<In, T>(p, n);
}

// Widens pairs of bfloat16 columns: the even columns and the odd columns. Both are the upper half of a lane.
FA_INLINE void widen_pairs(U32 pairs, F32& even, F32& odd) {
  even = (F32)(pairs << 16);
  odd = (F32)(pairs & 0xffff0000u);
}

template <class Out, class T>
FA_INLINE void store_tail_as(Out* p, Vec<T> x, int64_t n) {
  Out buffer[kLanes<T>];
  store_as<Out, T>(buffer, x);
  std::memcpy(p, buffer, n * sizeof(Out));
}

// Writes the first n lanes, at most a whole vector.
template <class T, class Out>
FA_INLINE void store_columns(Out* p, Vec<T> x, int64_t n) {
  n >= kLanes<T> ? store_as<Out, T>(p, x) : store_tail_as<Out, T>(p, x, n);
}

// Reads one value of any mask dtype as T.
template <class T>
inline T scalar_as(float x) {
  return static_cast<T>(x);
}
template <class T>
inline T scalar_as(double x) {
  return static_cast<T>(x);
}
template <class T, class Half>
inline T scalar_as(Half x) {
  Half16 v = {};
  v[0] = x.bits;
  return static_cast<T>(to_float(v, Half{})[0]);
}
