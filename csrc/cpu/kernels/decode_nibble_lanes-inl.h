// S^T = K Q^T of decode for keys of int4, with rows as lanes (decode_lanes-inl.h), on AVX2. A row of Q is rounded to int16
// (int16_rows-inl.h), and q = 256 high + low with two signed bytes. An instruction multiplies four nibbles by four bytes of Q in each
// lane. With groups g of columns, scales s, zero points z and nibbles n:
//
//   S_j = u sum_g (s_jg (256 sum_c high_c n_jc + sum_c low_c n_jc) - s_jg z_jg sum_c q_c)         c: the columns of group g
//
// u is the unit of the row. A sum of int16 has the products of a part, 32 columns: 8 products of two nibbles, at most 8 * 2 * 15 * 128.
// Then it is converted to float32 and multiplied by the scale of the part. A group is one or several parts.
//
// Nibbles become bytes once for all rows: [keys][pairs of parts][even, odd columns][32]. With kSpan 2 and 4, half of a span belongs to
// the first part of a pair, and half to the second.
#pragma once

#include "decode_groups-inl.h"
#include "decode_integer_columns-inl.h"
#include "decode_word_lanes-inl.h"

#if defined(FA_MULTIPLY_BYTES)

constexpr int64_t kPart = 32, kTwoParts = 2 * kPart;  // columns
constexpr int kNibbleKeys = 4;  // keys at a time: each has two sums of int16 and one of float32

// A plane of two parts, [2][4] elements of 4 bytes, in the order of kSpan. Returns the number of the element that becomes element `i`.
template <int kSpan>
constexpr int element_of_parts(int i) {
  constexpr int kUnit = kSpan / 2;
  return kSpan == 1 ? i : i / kUnit % 2 * 4 + i / kSpan * kUnit + i % kUnit;
}

// Returns the step of element `i` of a plane, among the steps of two parts. With kSpan 1, each part has steps of its own.
template <int kSpan>
constexpr int step_of_element(int plane, int i) {
  return kSpan == 1 ? i / 4 * 8 + plane * 4 + i % 4 : (plane * 8 + i) / kSpan;
}

// Returns the numbers of two parts in the lanes of their columns. With kSpan 1, it returns the number of one part in all lanes.
template <int kSpan>
FA_INLINE F32 broadcast_parts(const float* p) {
  if constexpr (kSpan == 1) {
    return splat<float>(*p);
  } else {
    const F32 both = broadcast_span<2>(p);
    if constexpr (kSpan == 2) return both;
    const VecIndex<float> halves = {0, 0, 1, 1, 4, 4, 5, 5};
    return pick<float>(both, both, halves);
  }
}

// The numbers of a key: a scale that multiplies S later, or scales of groups, or scales and zero points.
enum class KeyNumbers { kOneScale, kScales, kScalesAndZeros };

// out = factors * S^T for kNibbleKeys keys of `bytes`, at distance `ld`. `pairs`: of parts. `offsets`: sum_c q_c for each part,
// [parts][lanes], times 8 without zero points. `start`: the first sums of kOneScale.
template <int kSpan, KeyNumbers kNumbers>
FA_INLINE void nibble_lanes_block(const int8_t* q, S32 start, const float* offsets, int64_t pairs,
                                  const uint8_t* bytes, int64_t ld, const TileGroups& groups,
                                  int64_t ld_groups, F32 factors, float* out, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kNibbleKeys, kParts = kSpan == 1 ? 2 : 1;
  constexpr int kSteps = kSpan == 1 ? 4 : 8 / kSpan;  // of a plane of columns
  typedef int16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  std::conditional_t<kNumbers == KeyNumbers::kOneScale, S32, F32> total[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n)
    if constexpr (kNumbers == KeyNumbers::kOneScale)
      total[n] = start;
    else
      total[n] = F32{};
  const float *scales = groups.scales, *products = groups.products;
  for (int64_t pair = 0; pair < pairs; ++pair, bytes += kTwoParts) {
    ahead.lines(N * kTwoParts / 2 / 64);
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
      Words high[N] = {}, low[N] = {};
#pragma GCC unroll 8
      for (int step = 0; step < 2 * kSteps; ++step, q += 2 * FA_VECTOR_BYTES) {
        const auto vector = [&](int n) FA_INLINE_LAMBDA {
          return in_register(load_elements(reinterpret_cast<const Pair*>(q + n * FA_VECTOR_BYTES)));
        };
        const U32 query_high = vector(0), query_low = vector(1);
        const int64_t at = step / kSteps * kPart + (part * kSteps + step % kSteps) * 4 * kSpan;
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          const U32 key = broadcast_span<kSpan>(reinterpret_cast<const Pair*>(bytes + n * ld + at));
          // The compiler would add the products in another order, which needs more registers.
          high[n] = in_register(high[n] + (Words)FA_MULTIPLY_BYTES(key, query_high));
          low[n] = in_register(low[n] + (Words)FA_MULTIPLY_BYTES(key, query_low));
        }
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const S32 sum = FA_MULTIPLY_INT16(high[n], Words{} + 256) + FA_MULTIPLY_INT16(low[n], Words{} + 1);
        if constexpr (kNumbers == KeyNumbers::kOneScale) {
          total[n] += sum;
        } else {
          const F32 product = __builtin_convertvector(sum, F32), offset = load<float>(offsets),
                    scale = broadcast_parts<kSpan>(scales + n * ld_groups);
          if constexpr (kNumbers == KeyNumbers::kScales)
            total[n] += (product - offset) * scale;
          else
            total[n] += product * scale - broadcast_parts<kSpan>(products + n * ld_groups) * offset;
        }
      }
      offsets += L;
      scales += 2 / kParts;
      if constexpr (kNumbers == KeyNumbers::kScalesAndZeros) products += 2 / kParts;
    }
  }
  F32 sum[N];
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) sum[n] = __builtin_convertvector(total[n], F32);
  store_span_sums<float, kSpan>(sum, factors, out);
}

// The same for `keys` keys in one call: calls for each block of keys make a decode step take 1.03 of the time (Zen 3).
template <int kSpan, KeyNumbers kNumbers>
FA_NOINLINE void score_nibbles(const int8_t* q, S32 start, const float* offsets, int64_t pairs,
                               const uint8_t* bytes, int64_t ld, int64_t keys, const TileGroups& groups,
                               int64_t ld_groups, F32 factors, float* out, Prefetcher& ahead) {
  constexpr int N = kNibbleKeys;
  for (int64_t j = 0; j < keys; j += N, out += N * kLanes<float> / kSpan)
    nibble_lanes_block<kSpan, kNumbers>(q, start, offsets, pairs, bytes + j * ld, ld,
                                        groups.from(j, ld_groups), ld_groups, factors, out, ahead);
}

// Q of the task's heads as bytes, and the scales of the tile's keys and values. A head has blocks of rows.
struct NibbleLanes {
  static constexpr int64_t kKeys = 64;  // keys whose nibbles become bytes at once

  int8_t* q;                  // [heads][blocks][pairs of parts][2 * kSteps of a part][high, low][lanes][4]
  float* offsets;             // [heads][blocks][2 * pairs of parts][lanes]
  int32_t* starts;            // [heads][blocks][lanes]   -8 sum_c q_c of all columns
  float* factors;             // [heads][blocks][lanes]   the scale of the scores, times the unit of each row
  int8_t* split;              // [even, odd columns][high, low][whole / 2]   a row of q
  int16_t* rounded;           // [whole]
  uint8_t* bytes;             // [kKeys][whole]   the nibbles of keys
  TileGroups groups;          // [heads][block_k][parts]
  TileGroups rows_of_values;  // [block_k][groups]
  float* of_values;           // [heads][scales, products][groups][ld_values]
  int64_t value_groups, ld_values;
  bool has_groups;               // of keys
  int64_t cols, whole, numbers;  // D; D in whole pairs of parts; the numbers of a head's tile

  static NibbleLanes allocate(Arena& arena, const AttentionParams& p, int64_t heads, int64_t block_k) {
    constexpr int64_t L = kLanes<float>, kBlocks = IntegerLanes::kMostBlocks;
    NibbleLanes b{};
    if (p.varlen.cache.dtype != CacheDType::kInt4) return b;
    b.has_groups = has_groups_of(p.varlen.cache.k_groups);
    b.cols = p.sizes.head_dim;
    b.whole = ceil_div(b.cols, kTwoParts) * kTwoParts;
    b.numbers = (block_k + kNibbleKeys) * (b.cols / kPart) + L;
    b.q = arena.take<int8_t>(heads * kBlocks * b.block_bytes());
    b.offsets = arena.take<float>(heads * kBlocks * b.block_offsets());
    b.starts = arena.take<int32_t>(heads * kBlocks * L);
    b.factors = arena.take<float>(heads * kBlocks * L);
    b.split = arena.take<int8_t>(2 * b.whole);
    b.rounded = arena.take<int16_t>(b.whole);
    b.bytes = arena.take<uint8_t>(kKeys * b.whole);
    b.groups.scales = arena.take<float>(heads * b.numbers);
    if (p.varlen.cache.k_groups.zeros) b.groups.products = arena.take<float>(heads * b.numbers);
    const CacheGroups& of_value = p.varlen.cache.v_groups;
    b.value_groups = of_value.count;
    b.ld_values = whole_chunks(block_k);
    b.rows_of_values.scales = arena.take<float>(block_k * b.value_groups + L);
    if (of_value.zeros) b.rows_of_values.products = arena.take<float>(block_k * b.value_groups + L);
    b.of_values = arena.take<float>(heads * 2 * b.value_groups * b.ld_values);
    return b;
  }

  // Loads the numbers of a tile for the task's head `n`. Returns whether all are finite.
  bool load_numbers_of_keys(const AttentionParams& p, int64_t n, int64_t h_kv, int64_t j0,
                            int64_t keys) const {
    const CacheGroups& of_key = p.varlen.cache.k_groups;
    return groups.from(n, numbers).load_tile(p, of_key, h_kv, j0, keys, cols / kPart / of_key.count);
  }

  bool load_numbers_of_values(const AttentionParams& p, int64_t n, int64_t h_kv, int64_t j0,
                              int64_t keys) const {
    const bool is_finite = rows_of_values.load_tile(p, p.varlen.cache.v_groups, h_kv, j0, keys);
    rows_of_values.transpose_rows(value_groups, keys, whole_chunks(keys),
                                  of_values + n * 2 * value_groups * ld_values, ld_values);
    return is_finite;
  }
  // The numbers of values from key j of the tile on.
  ValueFactors factors_of_values(int64_t n, int64_t j) const {
    const float* scales = of_values + n * 2 * value_groups * ld_values + j;
    return {scales, rows_of_values.products ? scales + value_groups * ld_values : nullptr, value_groups,
            ld_values};
  }

  // Loads the rows of the task's head `n`. Rows of `from` are padded with zeros to whole vectors.
  void load_queries(int64_t n, int64_t rows, const float* from, int64_t ld, float scale) const {
    for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t count) {
      for_any_span<float>(count, [&](auto span) {
        load_block<span.value>(IntegerLanes::block_of(n, first), from + first * ld, ld, count, scale);
      });
    });
  }

  // factor * S^T of the task's head `n`, for `keys` keys. The first is key j of the tile, and key `first_key` of `to`.
  void load_scores(int64_t n, int64_t rows, const Rows<int8_t>& k, int64_t j, int64_t keys, float factor,
                   const LaneTile<float>& to, int64_t first_key, Prefetcher& ahead) const {
    const TileGroups numbers_of_keys = groups.from(n, numbers).from(j, cols / kPart);
    for (int64_t j0 = 0; j0 < keys; j0 += kKeys) {
      const int64_t count = std::min(kKeys, keys - j0);
      const TileGroups some = numbers_of_keys.from(j0, cols / kPart);
      Prefetcher nothing;
      // The first of several blocks has kSpan 1, and only the last block may have another order of bytes.
      for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t of_block) {
        for_any_span<float>(of_block, [&](auto span) {
          if (first == 0 || span.value > 1) load_bytes_of_keys<span.value>(k, j0, count);
          score_block<span.value>(IntegerLanes::block_of(n, first), count, some, factor,
                                  to.at(first, of_block, first_key + j0), first == 0 ? ahead : nothing);
        });
      });
    }
  }

 private:
  int64_t block_bytes() const { return 2 * whole * kLanes<float>; }
  int64_t block_offsets() const { return whole / kPart * kLanes<float>; }

  template <int kSpan>
  void load_block(int64_t block, const float* from, int64_t ld, int64_t rows, float scale) const {
    constexpr int L = kLanes<float>, kPartsAtOnce = kSpan == 1 ? 1 : 2, kSteps = 16 / kSpan;
    int8_t* const first = q + block * block_bytes();
    float *sums = offsets + block * block_offsets(), *of_rows = factors + block * L;
    int32_t* start = starts + block * L;
    std::memset(first, 0, block_bytes());
    std::fill(sums, sums + block_offsets(), 0.0f);
    std::fill(start, start + L, 0);
    std::fill(of_rows, of_rows + L, 0.0f);
    for (int64_t r = 0; r < rows; ++r) {
      int8_t* to = first;
      const float factor = scale * round_query(from + r * ld);
      for (int64_t i = r; i < L; i += L / kSpan)
        of_rows[i] = factor;  // the vectors of several keys repeat the rows
      for (int64_t part = 0; part < cols / kPart; ++part) {
        const int16_t* of_part = rounded + part * kPart;
        const int32_t sum = sum_of(of_part, kPart);
        const int64_t lane = kSpan == 1 ? r : r * kSpan + part % 2 * (kSpan / 2);
        sums[part / kPartsAtOnce * L + lane] = (groups.products ? 1.0f : kInt4Zero) * sum;
        start[lane] -= static_cast<int32_t>(kInt4Zero) * sum;
      }
      for (int64_t pair = 0; pair < whole / kTwoParts; ++pair, to += kSteps * 2 * FA_VECTOR_BYTES)
        for (int n = 0; n < 2 * 2 * 8; ++n) {
          const int plane = n / 16, half = n / 8 % 2, i = n % 8;  // half: high or low
          const int lane = (2 * step_of_element<kSpan>(plane, i) + half) * L + r * kSpan + i % kSpan;
          const int8_t* element =
              split + (2 * plane + half) * (whole / 2) + pair * kPart + element_of_parts<kSpan>(i) * 4;
          std::memcpy(to + lane * 4, element, 4);
        }
    }
  }

  static int32_t sum_of(const int16_t* words, int64_t count) {
    int32_t sum = 0;
    for (int64_t c = 0; c < count; ++c) sum += words[c];
    return sum;
  }
  // Rounds a row of q to bytes. Returns its unit.
  float round_query(const float* from) const {
    const float unit = round_row(from, cols, kLargestOfTwoBytes, rounded);
    std::fill(rounded + cols, rounded + whole, int16_t{0});
    split_row<2>(rounded, whole, split);
    return unit;
  }

  // bytes = the nibbles of `count` keys from key j on, in the order of kSpan. Zeros follow, for a whole block of keys.
  template <int kSpan>
  void load_bytes_of_keys(const Rows<int8_t>& k, int64_t j, int64_t count) const {
    VecIndex<float> order;
    for (int i = 0; i < kLanes<float>; ++i) order[i] = element_of_parts<kSpan>(i);
    int8_t last[kTwoParts / 2] = {};  // a part, and zeros in place of the second part
    uint8_t* to = bytes;
    for (int64_t n = j; n < j + count; ++n) {
      const int8_t* from = k.row(n);
      for (int64_t c = 0; c < cols; c += kTwoParts, from += kTwoParts / 2, to += kTwoParts) {
        const bool is_one = cols - c < kTwoParts;
        if (is_one) std::memcpy(last, from, kPart / 2);
        U32 both = load_elements(reinterpret_cast<const Pair*>(is_one ? last : from));
        if constexpr (kSpan > 1) both = (U32)pick<float>((F32)both, (F32)both, order);
        store_elements(reinterpret_cast<Pair*>(to), both & 0x0f0f0f0fu);
        store_elements(reinterpret_cast<Pair*>(to + kPart), both >> 4 & 0x0f0f0f0fu);
      }
    }
    std::memset(to, 0, ceil_div(count, kNibbleKeys) * kNibbleKeys * whole - count * whole);
  }

  template <int kSpan>
  void score_block(int64_t block, int64_t keys, const TileGroups& some, float factor, float* to,
                   Prefetcher& ahead) const {
    constexpr int64_t L = kLanes<float>;
    const F32 of_lanes = load<float>(factors + block * L) * factor;
    const int64_t parts = cols / kPart;
    const S32 start = load_sums(starts + block * L);
    const auto score = [&](auto numbers_of_key) {
      score_nibbles<kSpan, numbers_of_key.value>(q + block * block_bytes(), start,
                                                 offsets + block * block_offsets(), whole / kTwoParts, bytes,
                                                 whole, keys, some, parts, of_lanes, to, ahead);
    };
    if constexpr (kSpan == 1)  // otherwise IntegerColumns
      if (!has_groups) return score(std::integral_constant<KeyNumbers, KeyNumbers::kOneScale>{});
    if (!some.products) return score(std::integral_constant<KeyNumbers, KeyNumbers::kScales>{});
    score(std::integral_constant<KeyNumbers, KeyNumbers::kScalesAndZeros>{});
  }
};

// LaneIntegers of AVX2: words of int8, or bytes of int4. A last block of few rows may have columns as lanes.
struct WordsOrNibbles : IntegerLanes {
  static constexpr bool kHasGroups = true;  // NibbleLanes multiplies by the scales

  WordLanes words;
  NibbleLanes nibbles;
  IntegerColumns columns;

  static WordsOrNibbles allocate(Arena& arena, const AttentionParams& p, int64_t heads, int64_t block_k) {
    WordsOrNibbles b{};
    static_cast<IntegerLanes&>(b) = IntegerLanes::allocate(arena, p, block_k);
    b.words = WordLanes::allocate(arena, p, heads);
    b.nibbles = NibbleLanes::allocate(arena, p, heads, block_k);
    b.columns = IntegerColumns::allocate(arena, p, heads, b.planes);
    return b;
  }
  void load_queries(int64_t n, int64_t rows, const float* from, int64_t ld, float scale) const {
    const int64_t of_lanes = rows_of_lanes(rows);
    planes == 2 ? nibbles.load_queries(n, of_lanes, from, ld, scale)
                : words.load_queries(n, of_lanes, from, ld, scale);
    if (of_lanes < rows) columns.load_queries(n, rows - of_lanes, from + of_lanes * ld, ld, scale);
  }
  void load_scores(int64_t n, int64_t rows, const Rows<int8_t>& k, int64_t j, int64_t keys, float factor,
                   const LaneTile<float>& to, int64_t first_key, Prefetcher& ahead) const {
    const int64_t of_lanes = rows_of_lanes(rows), of_columns = rows - of_lanes;
    if (of_lanes == 0) return columns.load_scores(n, rows, k, keys, factor, to.at(0, rows, first_key), ahead);
    planes == 2 ? nibbles.load_scores(n, of_lanes, k, j, keys, factor, to, first_key, ahead)
                : words.load_scores(n, of_lanes, k, keys, factor, to, first_key, ahead);
    if (of_columns == 0) return;
    Prefetcher nothing;
    columns.load_scores(n, of_columns, k, keys, factor, to.at(of_lanes, of_columns, first_key), nothing);
  }

 private:
  // Returns how many of the first rows are lanes: all rows, or all but the last block.
  int64_t rows_of_lanes(int64_t rows) const {
    const int64_t last = rows_of_last_block<BFloat16, float>(rows);
    return columns.multiplies(last) ? rows - last : rows;
  }
};

#endif
