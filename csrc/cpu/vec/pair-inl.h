// Products of pairs of 16-bit values, for ISAs that have them. A Pair contains two consecutive values along the depth of a
// product. Each product multiplies two pairs per lane, and adds both results to a sum:
//   FA_DOT_BFLOAT16   bfloat16 without widening, sums in float32
//   FA_DOT_INT16      int8, widened to int16 before, sums in int32
#pragma once

#include "convert-inl.h"

// An ISA with FA_WIDEN_INT8 multiplies int8 as pairs. Without AVX-512 VNNI, a product is two instructions.
#if defined(FA_WIDEN_INT8) && !defined(FA_DOT_INT16)
#define FA_DOT_INT16(sum, a, b) ((sum) + FA_MULTIPLY_INT16(a, b))
#endif

#if defined(FA_DOT_BFLOAT16) || defined(FA_DOT_INT16)
#define FA_HAS_PAIRS

struct Pair {
  uint16_t low, high;  // even depth, odd depth: memory order
};

constexpr int64_t pairs_of(int64_t n) { return (n + 1) / 2; }

FA_INLINE uint32_t bits_of(const Pair* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return bits;
}
typedef uint32_t UnalignedPairs __attribute__((vector_size(FA_VECTOR_BYTES), aligned(2), may_alias));
FA_INLINE U32 load_elements(const Pair* p) { return *reinterpret_cast<const UnalignedPairs*>(p); }
FA_INLINE void store_elements(Pair* p, U32 x) { *reinterpret_cast<UnalignedPairs*>(p) = x; }

FA_INLINE F32 load_sums(const float* p) { return load<float>(p); }
FA_INLINE void store_sums(float* p, F32 x) { store<float>(p, x); }

// interleave() returns the values of two rows, `low` and `high`, as pairs across them: first half and second half of the
// columns.
#if defined(FA_ZIP16_LOW)

FA_INLINE void interleave(U32 low, U32 high, U32& first, U32& second) {
  first = FA_ZIP16_LOW(low, high);
  second = FA_ZIP16_HIGH(low, high);
}

#else

FA_INLINE void interleave(U32 low, U32 high, U32& first, U32& second) {
  typedef uint16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  constexpr int L = kLanes<float>;
  Words from_first, from_second;
  for (int i = 0; i < L; ++i) {
    from_first[2 * i] = i;
    from_first[2 * i + 1] = 2 * L + i;
    from_second[2 * i] = L + i;
    from_second[2 * i + 1] = 3 * L + i;
  }
  first = FA_PERMUTE16_2(low, high, from_first);
  second = FA_PERMUTE16_2(low, high, from_second);
}

#endif

#if defined(FA_DOT_BFLOAT16_LANE)

// The instruction broadcasts one pair of a vector to all lanes.
typedef uint32_t OnePair __attribute__((vector_size(8)));
FA_INLINE OnePair broadcast_element(const Pair* p) { return OnePair{bits_of(p), 0}; }
FA_INLINE F32 multiply_add(F32 sum, OnePair a, U32 b) { return FA_DOT_BFLOAT16_LANE(sum, a, b); }

#else

FA_INLINE U32 broadcast_element(const Pair* p) { return U32{} + bits_of(p); }

#endif

#if defined(FA_DOT_BFLOAT16)

FA_INLINE F32 multiply_add(F32 sum, U32 a, U32 b) { return FA_DOT_BFLOAT16(sum, a, b); }

// Returns the lanes of two rows as pairs, rounded to bfloat16.
FA_INLINE U32 pair_up(F32 low, F32 high) {
#if defined(FA_ZIP16_LOW)
  return FA_ZIP16_LOW(FA_CVTPS_BF16_2(low, low), FA_CVTPS_BF16_2(high, high));
#else
  typedef uint16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  Words interleaved;
  for (int i = 0; i < kLanes<float>; ++i) {
    interleaved[2 * i] = i;
    interleaved[2 * i + 1] = kLanes<float> + i;
  }
  return FA_PERMUTE16(FA_CVTPS_BF16_2(low, high), interleaved);
#endif
}

#endif

#if defined(FA_DOT_INT16)
typedef VecIndex<float> S32;
FA_INLINE S32 multiply_add(S32 sum, U32 a, U32 b) { return FA_DOT_INT16(sum, a, b); }

// Loads `n` <= 2 * lanes bytes of a row as pairs of int16 along it, padded with zeros.
FA_INLINE U32 load_pairs(const int8_t* p, int64_t n) {
  constexpr int64_t kMost = 2 * kLanes<float>;
  if (n >= kMost) return FA_WIDEN_INT8(p);
  int8_t buffer[kMost] = {};
  std::memcpy(buffer, p, n);
  return FA_WIDEN_INT8(buffer);
}

FA_INLINE S32 load_sums(const int32_t* p) { return (S32)load<float>(reinterpret_cast<const float*>(p)); }
FA_INLINE void store_sums(int32_t* p, S32 x) { store<float>(reinterpret_cast<float*>(p), (F32)x); }
#endif

#endif
