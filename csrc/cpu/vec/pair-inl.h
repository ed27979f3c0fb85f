// bfloat16 products without widening, where the ISA has them: one instruction multiplies two pairs of values
// a lane and adds them up in float32. A Pair holds two values that lie behind each other along the depth of a
// product.
#pragma once

#include "convert-inl.h"

#if defined(FA_DOT_BFLOAT16)

struct Pair {
  uint16_t low, high;  // even depth, odd depth: memory order
};

FA_INLINE U32 broadcast_element(const Pair* p) {
  uint32_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return U32{} + bits;
}
typedef uint32_t UnalignedPairs __attribute__((vector_size(FA_VECTOR_BYTES), aligned(2), may_alias));
FA_INLINE U32 load_elements(const Pair* p) { return *reinterpret_cast<const UnalignedPairs*>(p); }
FA_INLINE void store_elements(Pair* p, U32 x) { *reinterpret_cast<UnalignedPairs*>(p) = x; }
FA_INLINE F32 multiply_add(F32 sum, U32 a, U32 b) { return FA_DOT_BFLOAT16(sum, a, b); }

// Lanes of two rows as pairs, rounded to bfloat16.
FA_INLINE U32 pair_up(F32 low, F32 high) {
  typedef uint16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  Words interleaved;
  for (int i = 0; i < kLanes<float>; ++i) {
    interleaved[2 * i] = i;
    interleaved[2 * i + 1] = kLanes<float> + i;
  }
  return FA_PERMUTE16(FA_CVTPS_BF16_2(low, high), interleaved);
}

// Values of two rows, `low` and `high`, as pairs across them: those of the first half of the columns, and of
// the second.
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
