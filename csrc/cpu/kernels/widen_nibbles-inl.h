// Converts rows of int4 caches to the type of q or of the accumulator: (nibble - zero) * scale, rounded once.
#pragma once

#include "widen_bytes-inl.h"

typedef uint64_t Bits64 __attribute__((vector_size(FA_VECTOR_BYTES)));
typedef uint64_t HalfBits64 __attribute__((vector_size(FA_VECTOR_BYTES / 2)));

// Loads 1, 2 or 4 numbers to the first lanes of a vector, in registers, because a vector load would wait for stores of
// its parts.
template <int kCount, class Number>
FA_INLINE F32 load_few_numbers(const Number* p) {
  std::conditional_t<sizeof(Number) == 4, Bits64, HalfBits64> bits = {};
  uint64_t part = 0;
  std::memcpy(&part, p, std::min<size_t>(kCount * sizeof(Number), 8));
  bits[0] = part;
  if constexpr (kCount * sizeof(Number) == 16) {
    std::memcpy(&part, p + 2, 8);
    bits[1] = part;
  }
  if constexpr (sizeof(Number) == 4) {
    return (F32)bits;
  } else {
    return to_float((Half16)bits, Number{});
  }
}

// Loads `n` numbers of a row of scales or zero points, at most a whole vector, padded with zeros.
template <class Number>
FA_INLINE F32 load_numbers(const Number* p, int64_t n) {
  if (n == 1) return load_few_numbers<1>(p);
  if (n == 2) return load_few_numbers<2>(p);
  if (n == 4 && kLanes<float> >= 4) return load_few_numbers<4>(p);
  return load_columns<float>(p, n);
}

// The scales or zero points of one row.
struct NumberRow {
  const void* data;
  bool is_float16;

  FA_INLINE F32 load(int64_t first, int64_t n) const {
    return is_float16 ? load_numbers(static_cast<const Float16*>(data) + first, n)
                      : load_numbers(static_cast<const float*>(data) + first, n);
  }
  float at(int64_t n) const { return load(n, 1)[0]; }
};
inline NumberRow number_row(const Tensor4& t, bool is_float16, int64_t b, int64_t h, int64_t s) {
  if (is_float16) return {t.row<Float16>(b, h, s), true};
  return {t.row<float>(b, h, s), false};
}

// Copies one row of int4: (nibble - zero) * scale. The product is rounded to In. `b`, `s`: the cache or page, and the row
// in it.
template <class In>
inline void copy_nibbles(In* to, const uint8_t* from, int64_t cols, const CacheGroups& groups, int64_t b,
                         int64_t h, int64_t s) {
  constexpr int L = kLanes<float>;
  const NumberRow scales = number_row(groups.scales, groups.is_float16, b, h, s),
                  zeros = number_row(groups.zeros, groups.is_float16, b, h, s);
  for (int64_t group = 0; group < groups.count; ++group) {
    const float scale = scales.at(group), zero = groups.zeros ? zeros.at(group) : kInt4Zero;
    const int64_t end = std::min((group + 1) * groups.columns, cols);
    for (int64_t c = group * groups.columns; c < end; c += 2 * L) {
      const U32 bytes = widen(load_bytes(from + c / 2, (end - c) / 2));
      F32 columns[2] = {(__builtin_convertvector((VecIndex<float>)(bytes & 15u), F32) - zero) * scale,
                        (__builtin_convertvector((VecIndex<float>)(bytes >> 4), F32) - zero) * scale};
      interleave_lanes<float>(columns[0], columns[1]);
      for (int64_t n = 0; n < 2 && c + n * L < end; ++n) {
        In* at = to + c + n * L;
        const int64_t count = std::min<int64_t>(L, end - c - n * L);
        if constexpr (std::is_same_v<In, double>) {
          for (int64_t i = 0; i < count; ++i) at[i] = double{columns[n][i]};
        } else {
          store_columns<float>(at, columns[n], count);
        }
      }
    }
  }
}

// Whether copy_nibble_rows() looks up 32 columns in one permutation.
#if defined(FA_PERMUTE16)
constexpr bool kLooksUpNibbles = true;

// Returns a number in all lanes.
FA_INLINE F32 broadcast_number(const float* p) { return splat<float>(*p); }
FA_INLINE F32 broadcast_number(const Float16* p) {
  uint16_t bits;
  std::memcpy(&bits, p, sizeof(bits));
  return to_float(Half16{} + bits, Float16{});
}

// A lane has one byte of the 16 bytes: its nibbles are in the low bits of two words.
FA_INLINE U32 nibbles_in_words(const uint8_t* from) {
  const U32 bytes = widen(*reinterpret_cast<const UnalignedBytes*>(from));
  return bytes | bytes << 12;
}

// Copies rows of groups that are whole vectors. `columns`: of a group. The strides are distances of rows.
template <bool kHasZeros, class Number>
FA_NOINLINE void look_up_nibble_rows(BFloat16* to, const uint8_t* from, int64_t stride, int64_t rows,
                                     int64_t cols, int64_t columns, const Number* scales,
                                     int64_t stride_scales, const Number* zeros, int64_t stride_zeros) {
  constexpr int64_t kStep = 2 * kLanes<float>;
  const auto values_of = [&](int64_t group) FA_INLINE_LAMBDA {  // of the 16 nibbles
    const F32 zero = kHasZeros ? broadcast_number(zeros + group) : splat<float>(kInt4Zero);
    return (__builtin_convertvector(iota<float>(), F32) - zero) * broadcast_number(scales + group);
  };
  // A lookup reads 5 bits of a word: the nibble, and the lowest bit of the next nibble or 0.
  const auto look_up = [&](U32 table, U32 words, int64_t c) FA_INLINE_LAMBDA {
    store_elements(reinterpret_cast<Pair*>(to + c), FA_PERMUTE16(table, words));
  };
  for (int64_t n = 0; n < rows;
       ++n, from += stride, scales += stride_scales, zeros += stride_zeros, to += cols) {
    int64_t c = 0, group = 0;
    if (columns == kStep)
      for (; c + 2 * kStep <= cols;
           c += 2 * kStep, group += 2) {  // a table of two groups: bit 4 is the group
        const U32 table = (U32)FA_CVTPS_BF16_2(values_of(group), values_of(group + 1));
        look_up(table, nibbles_in_words(from + c / 2) & 0xffefffefu, c);
        look_up(table, nibbles_in_words(from + (c + kStep) / 2) | 0x00100010u, c + kStep);
      }
    for (; c < cols; ++group) {
      const F32 values = values_of(group);
      const U32 table = (U32)FA_CVTPS_BF16_2(values, values);  // equal for both values of bit 4
      for (const int64_t end = c + columns; c < end; c += kStep)
        look_up(table, nibbles_in_words(from + c / 2), c);
    }
  }
}
#else
constexpr bool kLooksUpNibbles = false;
#endif

// Copies rows of int4 at distance `cols`. `stride`: the distance of their bytes. `s`: the first row in the cache or page `b`.
template <class In>
inline void copy_nibble_rows(In* to, const uint8_t* from, int64_t stride, int64_t rows, int64_t cols,
                             const CacheGroups& groups, int64_t b, int64_t h, int64_t s) {
#if defined(FA_PERMUTE16)
  constexpr int64_t kStep = 2 * kLanes<float>;
  if constexpr (std::is_same_v<In, BFloat16>)
    if (cols % kStep == 0 && groups.columns % kStep == 0) {
      const auto copy = [&](auto has_zeros, auto number) {
        using Number = decltype(number);
        look_up_nibble_rows<has_zeros.value, Number>(
            to, from, stride, rows, cols, groups.columns, groups.scales.row<Number>(b, h, s),
            groups.scales.stride_s, has_zeros.value ? groups.zeros.row<Number>(b, h, s) : nullptr,
            groups.zeros.stride_s);
      };
      const auto copy_numbers = [&](auto number) {
        groups.zeros ? copy(std::true_type{}, number) : copy(std::false_type{}, number);
      };
      return groups.is_float16 ? copy_numbers(Float16{}) : copy_numbers(0.0f);
    }
#endif
  for (int64_t n = 0; n < rows; ++n)
    copy_nibbles(to + n * cols, from + n * stride, cols, groups, b, h, s + n);
}
