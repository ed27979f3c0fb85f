// Converts rows of 8-bit caches to the type of q or of the accumulator.
#pragma once

#include "../vec/pair-inl.h"
#include "tiles-inl.h"

// Widens kLanes<float> 8-bit elements. Uses FA_WIDEN_BYTES if the ISA has it, because GCC 12 extracts the lanes one
// by one.
typedef uint8_t Bytes __attribute__((vector_size(kLanes<float>)));
typedef uint8_t UnalignedBytes __attribute__((vector_size(kLanes<float>), aligned(1), may_alias));
#if defined(FA_WIDEN_BYTES)
FA_INLINE U32 widen(Bytes x) { return FA_WIDEN_BYTES(x); }
FA_INLINE VecIndex<float> widen_signed(Bytes x) { return FA_WIDEN_SIGNED_BYTES(x); }
#else
FA_INLINE U32 widen(Bytes x) { return __builtin_convertvector(x, U32); }
FA_INLINE VecIndex<float> widen_signed(Bytes x) {
  typedef int8_t SignedBytes __attribute__((vector_size(kLanes<float>)));
  return __builtin_convertvector((SignedBytes)x, VecIndex<float>);
}
#endif

FA_INLINE Bytes load_bytes(const uint8_t* p, int64_t n) {
  if (n >= kLanes<float>) return *reinterpret_cast<const UnalignedBytes*>(p);
  Bytes bytes = {};
  std::memcpy(&bytes, p, n);
  return bytes;
}

// Converts 8-bit elements to floats.
template <CacheDType dtype>
FA_INLINE F32 float_of(Bytes bytes) {
  if constexpr (dtype == CacheDType::kInt8) return __builtin_convertvector(widen_signed(bytes), F32);
  // The bits of a float with the wrong exponent: the two formats have different exponent biases.
  const U32 bits = widen(bytes), magnitude = bits & 0x7fu, sign = (bits & 0x80u) << 24;
  constexpr bool e4m3 = dtype == CacheDType::kFloat8E4M3;
  const F32 value = (F32)(magnitude << (e4m3 ? 20 : 21)) * (e4m3 ? 0x1p120f : 0x1p112f);
  const U32 inf_or_nan = magnitude == 0x7cu && !e4m3 ? U32{} + 0x7f800000u : U32{} + 0x7fc00000u;
  const auto special = magnitude >= (e4m3 ? 0x7fu : 0x7cu);
  return (F32)((special ? inf_or_nan : (U32)value) | sign);
}

// The lanes are 0 below the upper half: a value that fits into 16 bits needs no rounding.
FA_INLINE void store_exact(BFloat16* to, F32 x) {
  *reinterpret_cast<UnalignedHalf16*>(to) = __builtin_convertvector((U32)x >> 16, Half16);
}
template <class In>
FA_INLINE void store_exact(In* to, F32 x) {
  store_as<In, float>(to, x);
}

// Stores two vectors of 16-bit values.
template <class In>
FA_INLINE void store_exact(In* to, F32 low, F32 high) {
  store_exact(to, low);
  store_exact(to + kLanes<float>, high);
}
#if defined(FA_DOT_BFLOAT16)
// One store, so that store forwarding works for a later load of the whole vector.
FA_INLINE void store_exact(BFloat16* to, F32 low, F32 high) {
  store_elements(reinterpret_cast<Pair*>(to), (U32)FA_CVTPS_BF16_2(low, high));
}
#endif

// The bits of a float8 magnitude in a 16-bit type, which represents each float8 exactly.
constexpr uint16_t widened_float8(int code, bool e4m3, bool bfloat16) {
  const int mantissa_bits = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  const int to_bits = bfloat16 ? 7 : 10, to_bias = bfloat16 ? 127 : 15;
  const int infinity = bfloat16 ? 0x7f80 : 0x7c00;
  if (e4m3 ? code == 0x7f : code > 0x7c) return infinity | 1 << (to_bits - 1);  // NaN
  if (!e4m3 && code == 0x7c) return infinity;
  if (!e4m3 && !bfloat16) return code << 8;  // e5m2 is the upper half of a float16
  int exponent = code >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  if (code == 0) return 0;
  if (exponent == 0)  // a subnormal is a normal number of the wider type
    for (exponent = 1; mantissa >> mantissa_bits == 0; --exponent) mantissa <<= 1;
  mantissa &= (1 << mantissa_bits) - 1;
  return (exponent - bias + to_bias) << to_bits | mantissa << (to_bits - mantissa_bits);
}

#if defined(FA_SHUFFLE_BYTES)

// Converts float8 to bfloat16 by bytes. A shuffle looks up 16 of them, and the lower byte of a normal number has only bits of
// the code: e4m3 is s eeee mmm, and bfloat16 is s EEEEEEE | E mmm 0000 with E = e + 120. So its lower byte is code << 4.
template <CacheDType dtype>
class Float8Shuffles {
  typedef uint8_t Codes __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef uint8_t UnalignedCodes __attribute__((vector_size(FA_VECTOR_BYTES), aligned(1), may_alias));
  typedef uint16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef uint16_t UnalignedWords __attribute__((vector_size(FA_VECTOR_BYTES), aligned(2), may_alias));
  static constexpr bool kE4M3 = dtype == CacheDType::kFloat8E4M3;
  static constexpr int kMantissaBits = kE4M3 ? 3 : 2, kShift = 7 - kMantissaBits;
  static constexpr uint8_t kLeastNormal = 1 << kMantissaBits, kLeastSpecial = kE4M3 ? 0x7f : 0x7c,
                           kLowBits = static_cast<uint8_t>((2 * kLeastNormal - 1) << kShift);

  // `high`: the upper bytes of normal numbers, by the upper 4 bits of the magnitude. The others: what differs in subnormal
  // numbers, by the lower 4 bits of magnitude - kLeastNormal.
  struct Tables {
    uint8_t high[16] = {}, subnormal_high[16] = {}, subnormal_low[16] = {};
    constexpr Tables() {
      for (int n = 0; n < 16; ++n) high[n] = widened_float8(n == 0 ? kLeastNormal : n << 3, kE4M3, true) >> 8;
      for (int n = 0; n < kLeastNormal; ++n) {
        const int subnormal = widened_float8(n, kE4M3, true), at = 16 - kLeastNormal + n;
        subnormal_high[at] = static_cast<uint8_t>(high[0] ^ subnormal >> 8);
        subnormal_low[at] = static_cast<uint8_t>(n << kShift ^ subnormal);
      }
    }
  };
  static constexpr Tables kTables{};
  Codes high_, subnormal_high_, subnormal_low_;

 public:
  static constexpr int64_t kCount = FA_VECTOR_BYTES;  // elements of copy()

  FA_INLINE Float8Shuffles()
      : high_((Codes)FA_BROADCAST_16_BYTES(kTables.high)),
        subnormal_high_((Codes)FA_BROADCAST_16_BYTES(kTables.subnormal_high)),
        subnormal_low_((Codes)FA_BROADCAST_16_BYTES(kTables.subnormal_low)) {}

  FA_INLINE void copy(BFloat16* to, const uint8_t* from) const {
    // Unpacking takes the first and the second half of each 16 bytes.
    const Codes codes = (Codes)FA_HALVES_TO_16_BYTES(*reinterpret_cast<const UnalignedCodes*>(from));
    const Codes magnitude = codes & 0x7f;
    // Bit 7 is 0 for subnormal numbers only. With bit 7 a shuffle gives 0.
    const Codes if_subnormal = magnitude + static_cast<uint8_t>(0x80 - kLeastNormal);
    const auto is_special = kE4M3 ? magnitude == kLeastSpecial : (codes & kLeastSpecial) == kLeastSpecial;
    const Codes high = (Codes)FA_SHUFFLE_BYTES(high_, (Codes)((Words)magnitude >> 3) & 15) ^
                       (Codes)FA_SHUFFLE_BYTES(subnormal_high_, if_subnormal);
    const Codes low =
        ((Codes)((Words)codes << kShift) & kLowBits) ^ (Codes)FA_SHUFFLE_BYTES(subnormal_low_, if_subnormal);
    // NaN and Inf: the exponent has all bits, and `low` is right.
    const Codes high_or_special = high | (codes & uint8_t{0x80}) | ((Codes)is_special & 0x7f);
    // No auto: it drops the alignment of the type.
    *reinterpret_cast<UnalignedWords*>(to) = (Words)FA_UNPACK8_LOW(low, high_or_special);
    *reinterpret_cast<UnalignedWords*>(to + kCount / 2) = (Words)FA_UNPACK8_HIGH(low, high_or_special);
  }
};

#endif

#if defined(FA_LOOKUP_128)

template <CacheDType dtype, class In>
struct Float8Table {
  uint16_t of_code[128] = {};
  constexpr Float8Table() {
    for (int code = 0; code < 128; ++code)
      of_code[code] = widened_float8(code, dtype == CacheDType::kFloat8E4M3, std::is_same_v<In, BFloat16>);
  }
};

// Converts 2 * kLanes<float> float8 elements by a lookup of their magnitudes: a third of the instructions of
// float_of() and rounding.
template <CacheDType dtype, class In>
FA_INLINE void copy_float8(In* to, const uint8_t* from) {
  static constexpr Float8Table<dtype, In> kTable;
  typedef uint16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  typedef uint16_t UnalignedWords __attribute__((vector_size(FA_VECTOR_BYTES), aligned(2), may_alias));
  const Words code = (Words)FA_WIDEN_BYTES_TO_16(from);
  const Words magnitude = (Words)FA_LOOKUP_128(kTable.of_code, code);
  *reinterpret_cast<UnalignedWords*>(to) = magnitude | (code << 8 & 0x8000);
}

template <CacheDType dtype, class In>
constexpr Float8Bytes float8_bytes() {
  constexpr Float8Table<dtype, In> table;
  Float8Bytes bytes;
  for (int code = 0; code < 128; ++code) {
    bytes.low[code] = static_cast<uint8_t>(table.of_code[code]);
    bytes.high[code] = static_cast<uint8_t>(table.of_code[code] >> 8);
  }
  return bytes;
}

#endif

// Copies one row of 8-bit elements, multiplied by `scale` if kScaled. The product is rounded to In. Without `scale`
// the copy is exact: a 16-bit type represents each 8-bit element.
template <CacheDType dtype, bool kScaled, class In>
inline void copy_coded(In* to, const uint8_t* from, int64_t cols, float scale) {
  constexpr int L = kLanes<float>;
  const auto value_at = [&](int64_t c, int64_t n) FA_INLINE_LAMBDA {
    const F32 value = float_of<dtype>(load_bytes(from + c, n));
    return kScaled ? value * scale : value;
  };
  if constexpr (std::is_same_v<In, double>) {
    for (int64_t c = 0; c < cols; c += L) {
      const int64_t n = std::min<int64_t>(L, cols - c);
      const F32 value = float_of<dtype>(load_bytes(from + c, n));
      for (int64_t i = 0; i < n; ++i) to[c + i] = kScaled ? double{value[i]} * scale : double{value[i]};
    }
  } else {
    int64_t c = 0;
#if defined(FA_LOOKUP_128)
    if constexpr (!kScaled && sizeof(In) == 2 && dtype != CacheDType::kInt8)
      for (; c + 2 * L <= cols; c += 2 * L) copy_float8<dtype>(to + c, from + c);
#endif
    if constexpr (!kScaled)
      for (; c + 2 * L <= cols; c += 2 * L) store_exact(to + c, value_at(c, L), value_at(c + L, L));
    for (; c + L <= cols; c += L) store_as<In, float>(to + c, value_at(c, L));
    if (c < cols) store_tail_as<In, float>(to + c, value_at(c, cols - c), cols - c);
  }
}

// Copies rows of 8-bit elements without a scale. `stride`, `ld`: the distances of rows in elements.
template <CacheDType dtype, class In>
inline void copy_coded_rows(In* to, int64_t ld, const uint8_t* from, int64_t stride, int64_t rows,
                            int64_t cols) {
#if defined(FA_LOOKUP_128)
  if constexpr (sizeof(In) == 2 && dtype != CacheDType::kInt8) {
    static constexpr Float8Bytes kBytes = float8_bytes<dtype, In>();
    if (WidenFloat8Rows* widen_rows = widen_float8_rows())
      return widen_rows(kBytes, from, stride, rows, cols, reinterpret_cast<uint16_t*>(to), ld);
  }
#endif
#if defined(FA_SHUFFLE_BYTES)
  if constexpr (std::is_same_v<In, BFloat16> && dtype != CacheDType::kInt8) {
    const Float8Shuffles<dtype> shuffles;
    const int64_t whole = cols / shuffles.kCount * shuffles.kCount;
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t c = 0; c < whole; c += shuffles.kCount)
        shuffles.copy(to + n * ld + c, from + n * stride + c);
      if (whole < cols)
        copy_coded<dtype, false>(to + n * ld + whole, from + n * stride + whole, cols - whole, 1.0f);
    }
    return;
  }
#endif
  for (int64_t n = 0; n < rows; ++n) copy_coded<dtype, false>(to + n * ld, from + n * stride, cols, 1.0f);
}

// Calls body(std::integral_constant<CacheDType, dtype>) for an 8-bit dtype.
template <class Body>
inline void for_cache_dtype(CacheDType dtype, const Body& body) {
  switch (dtype) {
    case CacheDType::kInt8: return body(std::integral_constant<CacheDType, CacheDType::kInt8>{});
    case CacheDType::kFloat8E4M3: return body(std::integral_constant<CacheDType, CacheDType::kFloat8E4M3>{});
    case CacheDType::kFloat8E5M2: return body(std::integral_constant<CacheDType, CacheDType::kFloat8E5M2>{});
    case CacheDType::kOfQuery:
    case CacheDType::kLatent:
    case CacheDType::kInt4: return;
  }
}

// Copies the first `cols` columns of a row of CacheDType::kLatent.
template <class In>
inline void copy_latent(In* to, const uint8_t* from, int64_t cols) {
  constexpr int64_t kGroups = kLatentColumns / kLatentGroup;
  float factors[kGroups];
  BFloat16 rotary[kRotaryColumns];
  std::memcpy(factors, from + kLatentColumns, sizeof(factors));
  std::memcpy(static_cast<void*>(rotary), from + kLatentColumns + sizeof(factors), sizeof(rotary));
  for (int64_t n = 0; n < kGroups; ++n)
    copy_coded<CacheDType::kFloat8E4M3, true>(to + n * kLatentGroup, from + n * kLatentGroup, kLatentGroup,
                                              factors[n]);
  for (int64_t c = kLatentColumns; c < cols; c += kLanes<float>) {
    const F32 x = load_columns<float>(rotary + c - kLatentColumns, kLanes<float>);
    if constexpr (std::is_same_v<In, double>) {
      for (int64_t n = 0; n < kLanes<float>; ++n) to[c + n] = double{x[n]};
    } else {
      store_as<In, float>(to + c, x);
    }
  }
}
