// O += P V of decode for a few rows of Q. P^T has rows as lanes (decode_lanes-inl.h). A probability is broadcast, and a vector
// holds columns of V: V is read and converted once for a group of rows (rows_of_group()).
#pragma once

#include "decode_lanes-inl.h"

// Values whose blocks have neighbouring columns. kParts: the blocks that read the same bytes, and each uses a part of their columns.
struct NeighbouringColumns {
  static constexpr int kParts = 1;
  // Returns a column of a block. `n`: the column's number among the sums of the block.
  static constexpr int64_t column_of(int64_t n) { return n; }
};

// Values that are read or widened to T, one key at a time.
template <class In, class T>
struct WideValues : NeighbouringColumns {
  using E = T;
  using Sum = Vec<T>;
  static constexpr int kKeys = 1, kVectors = 1, kColumnsOfElement = 1;
  // Loads `cols` columns, at most kVectors vectors, of the key and the next kKeys - 1 keys.
  FA_INLINE static void load(const In* v, int64_t, bool, int64_t cols, Vec<T>* value) {
    value[0] = load_columns<T>(v, cols);
  }
  FA_INLINE static void order_columns(Vec<T>*) {}
};

typedef uint32_t UnalignedColumnPairs __attribute__((vector_size(FA_VECTOR_BYTES), aligned(2), may_alias));

// Copies `cols` columns to `padded`, and zeros after them. A function, because loops over keys inline its callers.
FA_NOINLINE inline void pad_columns(const BFloat16* v, int64_t cols, BFloat16* padded) {
  std::memset(static_cast<void*>(padded), 0, 2 * kLanes<float> * sizeof(BFloat16));
  std::memcpy(static_cast<void*>(padded), v, cols * sizeof(BFloat16));
}

// bfloat16: the even and the odd columns of two vectors. This takes half the operations of widening each vector.
template <>
struct WideValues<BFloat16, float> : NeighbouringColumns {
  using E = float;
  using Sum = F32;
  static constexpr int kKeys = 1, kVectors = 2, kColumnsOfElement = 1;
  FA_INLINE static void load(const BFloat16* v, int64_t, bool, int64_t cols, F32* value) {
    constexpr int64_t kMost = 2 * kLanes<float>;
    BFloat16 buffer[kMost];
    if (cols < kMost) {
      pad_columns(v, cols, buffer);
      v = buffer;
    }
    widen_pairs(*reinterpret_cast<const UnalignedColumnPairs*>(v), value[0], value[1]);
  }
  FA_INLINE static void order_columns(F32* sum) { interleave_lanes<float>(sum[0], sum[1]); }
};

#if defined(FA_HAS_PAIRS)

// Indices for pick(): the even and the odd keys of two vectors of P^T, [keys][lanes].
struct KeysOfLanes {
  VecIndex<float> even, odd;

  explicit KeysOfLanes(int64_t lanes) {
    const int n = static_cast<int>(lanes);
    for (int i = 0; i < kLanes<float>; ++i) even[i] = i / n * 2 * n + i % n;
    odd = even + n;
  }
};

#endif

#if defined(FA_DOT_BFLOAT16)

// Rounds factor * P^T, [keys][lanes], to pairs of keys, [keys / 2][lanes]: writes the pairs of two vectors. The order of the rows
// is the same in both. write_probs() calls it. The pairs may replace P.
class LanePairs {
 public:
#if defined(FA_PERMUTE16)
  LanePairs(Pair* to, int64_t lanes, float factor = 1.0f) : to_(to), factor_(factor) {
    const int n = static_cast<int>(lanes);
    for (int i = 0; i < 2 * kLanes<float>; ++i) words_[i] = i / 2 / n * 2 * n + i % 2 * n + i / 2 % n;
  }
  FA_INLINE U32 round(F32 first, F32 second) const {
    return FA_PERMUTE16(FA_CVTPS_BF16_2(first, second), words_);
  }
#else
  LanePairs(Pair* to, int64_t lanes, float factor = 1.0f) : to_(to), factor_(factor), key_(lanes) {}
  FA_INLINE U32 round(F32 first, F32 second) const {
    return pair_up(pick<float>(first, second, key_.even), pick<float>(first, second, key_.odd));
  }
#endif
  // `n`: the even number of the first vector.
  FA_INLINE void operator()(int64_t n, F32 first, F32 second) const {
    store_elements(to_ + n / 2 * kLanes<float>, round(first * factor_, second * factor_));
  }

 private:
  Pair* to_;
  float factor_;
#if defined(FA_PERMUTE16)
  typedef uint16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
  Words words_;  // of pairs, in the order of keys and lanes
#else
  KeysOfLanes key_;
#endif
};

#endif

#if defined(FA_HAS_PAIRS)

// Values as pairs across two keys: of bfloat16, or of int16 from int8.
template <class In, class SumOfPairs>
struct PairValues : NeighbouringColumns {
  using E = Pair;
  using Sum = SumOfPairs;
  static constexpr int kKeys = 2, kVectors = 2, kColumnsOfElement = 1;
  FA_INLINE static void load(const In* v, int64_t stride, bool is_last, int64_t cols, U32* value) {
    const U32 first = load_pairs(v, cols), second = is_last ? U32{} : load_pairs(v + stride, cols);
#if FA_VECTOR_BYTES == 32
    // Within each 16 bytes: order_columns() moves the sums once, in place of all values.
    value[0] = FA_UNPACK16_LOW(first, second);
    value[1] = FA_UNPACK16_HIGH(first, second);
#else
    interleave(first, second, value[0], value[1]);
#endif
  }
  FA_INLINE static void order_columns([[maybe_unused]] Sum* sum) {
#if FA_VECTOR_BYTES == 32
    F32 rows[2] = {(F32)sum[0], (F32)sum[1]};
    transpose_parts<float, 4, 8, 1>(rows);
    sum[0] = (Sum)rows[0];
    sum[1] = (Sum)rows[1];
#endif
  }
};

#endif

// P^T of some rows: [keys / kKeys][lanes].
template <class E>
struct LaneProbs {
  const E* data;
  int64_t lanes;
  const float* units = nullptr;     // [lanes]   only of integers: the unit of each row
  const int32_t* starts = nullptr;  // [lanes]   only of int4: the first sum of each row
  const E* joined = nullptr;        // [keys][lanes / 2]   P^T of the last block, if joins_values()
  bool evenly = false;              // rows_of_group()
};

// Sums of P V in registers. Two vectors of V and one of P need registers, too. 8 sums would be just enough to hide the
// latency of two multiply-adds: 12 ran at 0.87 of the peak and 8 at 0.7 of it (AVX2, Zen 4).
constexpr int kValueSums = FA_VECTOR_REGISTERS == 16 ? 12 : kDotSums;
// AVX-512 has registers for more sums of some rows, so that a load serves more multiply-adds.
constexpr int kMostValueSums = FA_VECTOR_BYTES == 64 ? 24 : kValueSums;

// Returns whether the registers hold the sums of `rows` rows and `vectors` vectors of columns.
constexpr bool holds_value_sums(int rows, int vectors) {
  constexpr int kOthers = 3;  // a vector of P, and indices that interleave V
  const int sums = rows * vectors;
  return sums <= kValueSums || (sums <= kMostValueSums && sums + vectors + kOthers <= FA_VECTOR_REGISTERS);
}

// NV of the widest block of some rows.
template <class Values>
constexpr int widest_block(int rows) {
  int widest = 8;
  while (widest > 1 && !holds_value_sums(rows, widest * Values::kVectors)) widest /= 2;
  return widest;
}

// The most rows of a group, if a block has several groups, and if it has one: 9 to 12 rows are one group with AVX-512.
constexpr int kMostValueRows = kValueSums / 2, kMostRowsOfGroup = kMostValueSums / 2;

// The sums of a block before and after its next keys. null: the sums start from 0, and they are added to out.
template <class Sum>
struct KeptSums {
  const Sum* before = nullptr;
  Sum* after = nullptr;
};

// out[r][c] += sum_j P[r][j] V[j][c] for R rows and NV * kVectors vectors of columns from c on. `chunk`: the tile's rows
// of V. The last kJoined rows are in probs.joined. The sum starts from 0: it rounds like a sum of tiles, not like one long chain.
template <class Values, int R, int NV, int kJoined, class In, class T>
FA_INLINE void value_lanes_block(const LaneProbs<typename Values::E>& probs, int64_t row,
                                 const Rows<In>* chunk, int64_t c, int64_t keys, T* out, int64_t ldo,
                                 Prefetcher& ahead, const KeptSums<typename Values::Sum>& kept = {}) {
  constexpr int L = kLanes<T>, kCols = Values::kVectors * L, kVectors = NV * Values::kVectors;
  constexpr int kElements = kCols / Values::kColumnsOfElement;
  constexpr int64_t kBytes = NV * kElements * sizeof(In);  // of a key
  // Keys between two prefetches, with at most 8 lines. A prefetch takes as long as the products of a key. AVX2: with 16 keys
  // of less than a line, calls take 0.92 to 0.97 of the time (Zen 3).
  constexpr int kFewKeys = kHasVectorsOfRows && kBytes < 64
                               ? kChunkRows
                               : std::max<int>(std::min<int>(512 / kBytes, 4), Values::kKeys);
  constexpr int kOwn = R - kJoined;
  // Vectors of V that are multiplied together. 12 sums of 3 rows, 4 vectors and P do not fit in 16 registers, so P is broadcast twice: 3
  // rows of 16 bits take 0.90 to 0.95 of the time if K and V are in L3 (Zen 3).
  constexpr int kPart = FA_VECTOR_REGISTERS == 16 && R == 3 ? std::min(kVectors, 2) : kVectors;
  // 12 sums, two vectors of V, one of P and two products do not fit.
  constexpr bool kHasTwoProducts = R * kVectors + kVectors + 3 <= FA_VECTOR_REGISTERS;
  typename Values::Sum sum[R][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      sum[r][n] = kept.before ? kept.before[r * kVectors + n] : typename Values::Sum{};
      if constexpr (Values::kColumnsOfElement > 1)
        if (!kept.before) sum[r][n] += probs.starts[row + r];
    }
  const typename Values::E *p = probs.data + row, *p_joined = probs.joined;
  for (int64_t j0 = 0; j0 < keys; j0 += kChunkRows, ++chunk) {
    const In* v = chunk->data + c / Values::kColumnsOfElement;
    const int64_t stride = chunk->stride, cols = NV > 1 ? kCols : chunk->cols * Values::kColumnsOfElement - c,
                  count = std::min(kChunkRows, keys - j0);
    const auto add = [&](bool is_last) FA_INLINE_LAMBDA {
      decltype(load_elements(p)) value[kVectors];
#pragma GCC unroll 16
      for (int part = 0; part < kVectors; part += kPart) {
#pragma GCC unroll 16
        for (int n = part; n < part + kPart; n += Values::kVectors)
          Values::load(v + n / Values::kVectors * kElements, stride, is_last, cols, value + n);
        // With more rows the compiler loads each value once.
        if constexpr (R == 2 && kHasVectorsOfRows && std::is_same_v<In, T>)
#pragma GCC unroll 16
          for (int n = part; n < part + kPart; ++n) value[n] = in_register(value[n]);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const auto prob = broadcast_element(r < kOwn ? p + r : p_joined + (r - kOwn));
          add_products<kPart, kHasTwoProducts>(sum[r] + part, prob, value + part);
        }
        if constexpr (kPart < kVectors) asm volatile("" ::: "memory");  // broadcasts P again
      }
      v += Values::kKeys * stride;
      p += probs.lanes;
      if constexpr (kJoined > 0) p_joined += probs.lanes / 2;
    };
    for (int64_t j = 0; j < count; j += kFewKeys) {
      ahead.lines(lines_of<In>(kFewKeys * NV * kElements));
      // The other loop is not unrolled: it has partial vectors, or waits for multiply-adds of many rows.
      const bool is_unrolled = NV == widest_block<Values>(R) || R <= 4;
      if (is_unrolled && cols >= kCols && j + kFewKeys <= count) {
#pragma GCC unroll 4
        for (int n = 0; n < kFewKeys; n += Values::kKeys) add(false);
      } else {
        const int64_t end = std::min(j + kFewKeys, count);
        for (int64_t n = j; n < end; n += Values::kKeys) add(n + 1 == count);
      }
    }
  }
  if (kept.after) {
#pragma GCC unroll 16
    for (int n = 0; n < R * kVectors; ++n) kept.after[n] = sum[n / kVectors][n % kVectors];
    return;
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int n = 0; n < NV; ++n) Values::order_columns(sum[r] + n * Values::kVectors);
#pragma GCC unroll 16
    for (int n = 0; n < kVectors; ++n) {
      T* to = out + r * ldo + c + Values::column_of(n * L);
      if constexpr (std::is_same_v<typename Values::Sum, Vec<T>>)
        store<T>(to, load<T>(to) + sum[r][n]);
      else
        store<T>(to, load<T>(to) + __builtin_convertvector(sum[r][n], Vec<T>) * probs.units[row + r]);
    }
  }
}

// Calls body(values, c) for all whole blocks of NV units of columns. Returns the first column after them.
template <class Values, int NV, class T, class Body>
FA_INLINE int64_t for_each_block(int64_t cols, const Body& body) {
  constexpr int kCols = NV * Values::kVectors * kLanes<T>;
  int64_t c = 0;
  if constexpr (NV == 1 && Values::kParts == 4)
    for (; c + Values::kParts * kCols <= cols; c += Values::kParts * kCols) {
      body(typename Values::template Part<0>{}, c);
      body(typename Values::template Part<1>{}, c);
      body(typename Values::template Part<2>{}, c);
      body(typename Values::template Part<3>{}, c);
    }
  for (; c + kCols <= cols; c += kCols) body(Values{}, c);
  return c;
}

// AVX2, 4 rows of Q and values of 8 or 4 bits: the passes over V take turns of a chunk of rows. With rows far apart, 64 rows do not stay in
// their sets of L1 from pass to pass, and V of int8 takes 1.5 times as long. With 8 adjacent heads, calls with int8 take 0.94 of the time,
// 16 bits 1.0 to 1.04 (Zen 3). Other numbers of rows have fewer passes or several groups: 1.02 to 1.04.
template <int R, int kJoined, class In>
constexpr bool kHasTurns = FA_VECTOR_BYTES == 32 && R == 4 && kJoined == 0 && sizeof(In) == 1;
constexpr int64_t kLeastStrideOfTurns = 1024, kMostColumnsOfTurns = 256;  // bytes, columns

// As add_value_lanes(), in turns. The order of each sum is the same.
template <class Values, int R, class In, class T>
FA_NOINLINE void add_value_lanes_in_turns(const LaneProbs<typename Values::E>& probs, int64_t row,
                                          const Rows<In>* chunk, int64_t keys, T* out, int64_t ldo,
                                          Prefetcher& ahead) {
  using Sum = typename Values::Sum;
  constexpr int kWide = widest_block<Values>(R), kCols = kWide * Values::kVectors * kLanes<T>;
  constexpr int kSums = R * kWide * Values::kVectors;  // of a block
  Sum sums[kMostColumnsOfTurns / kCols * kSums];
  LaneProbs<typename Values::E> some = probs;
  for (int64_t j = 0; j < keys; j += kChunkRows, ++chunk) {
    Sum* of_block = sums;
    for_each_block<Values, kWide, T>(
        chunk->cols * Values::kColumnsOfElement, [&](auto values, int64_t c) FA_INLINE_LAMBDA {
          value_lanes_block<decltype(values), R, kWide, 0>(
              some, row, chunk, c, std::min(kChunkRows, keys - j), out, ldo, ahead,
              {j > 0 ? of_block : nullptr, j + kChunkRows < keys ? of_block : nullptr});
          of_block += kSums;
        });
    some.data += kChunkRows / Values::kKeys * probs.lanes;
  }
}

template <class Values, int R, int kJoined, class In, class T>
void add_value_lanes(const LaneProbs<typename Values::E>& probs, int64_t row, const Rows<In>* chunk,
                     int64_t keys, T* out, int64_t ldo, Prefetcher& ahead) {
  constexpr int kWide = widest_block<Values>(R);
  constexpr int kCols = Values::kVectors * kLanes<T>;
  const int64_t cols = chunk->cols * Values::kColumnsOfElement;
  if constexpr (kHasTurns<R, kJoined, In>)
    if (keys > kChunkRows && chunk->stride >= kLeastStrideOfTurns && cols % (kWide * kCols) == 0 &&
        cols <= kMostColumnsOfTurns)
      return add_value_lanes_in_turns<Values, R>(probs, row, chunk, keys, out, ldo, ahead);
  int64_t c = for_each_block<Values, kWide, T>(cols, [&](auto values, int64_t first) FA_INLINE_LAMBDA {
    value_lanes_block<decltype(values), R, kWide, kJoined>(probs, row, chunk, first, keys, out, ldo, ahead);
  });
  for (; c < cols; c += kCols)
    value_lanes_block<Values, R, 1, kJoined>(probs, row, chunk, c, keys, out, ldo, ahead);
}

// Returns how many of the remaining rows the next group has. With 16 registers a group of 6 is the fastest for each row. Otherwise, and
// if `evenly`, all groups have about the same size.
constexpr int64_t rows_of_group(int64_t rows, bool evenly = false) {
  if (FA_VECTOR_REGISTERS == 16 && !evenly) return std::min<int64_t>(rows, kMostValueRows);
  if (rows <= kMostRowsOfGroup) return rows;
  // In 32 bits, because a division of 64 bits takes 40 cycles on some CPUs.
  const auto groups = static_cast<uint32_t>(ceil_div(rows, kMostValueRows));
  return (static_cast<uint32_t>(rows) + groups - 1) / groups;
}

// Returns how many columns of V a product of `rows` rows reads in one pass over the keys.
template <class Values, class T>
int64_t columns_of_pass(int64_t rows) {
  return widest_block<Values>(static_cast<int>(rows_of_group(rows))) * Values::kVectors * kLanes<T>;
}

// Calls body(R) for a group of `rows` rows.
template <class Body>
void for_group(int64_t rows, const Body& body) {
  const auto call = [&](auto few) {
    if constexpr (rows_of_group(few.value) == few.value) body(few);
  };
  switch (rows) {
    case 1: return call(std::integral_constant<int, 1>{});
    case 2: return call(std::integral_constant<int, 2>{});
    case 3: return call(std::integral_constant<int, 3>{});
    case 4: return call(std::integral_constant<int, 4>{});
    case 5: return call(std::integral_constant<int, 5>{});
    case 6: return call(std::integral_constant<int, 6>{});
    case 7: return call(std::integral_constant<int, 7>{});
    case 8: return call(std::integral_constant<int, 8>{});
    case 9: return call(std::integral_constant<int, 9>{});
    case 10: return call(std::integral_constant<int, 10>{});
    case 11: return call(std::integral_constant<int, 11>{});
    default: return call(std::integral_constant<int, 12>{});
  }
}

// out += P V for a whole tile and `rows` rows: of a block, and of probs.joined.
template <class Values, class In, class T>
void add_values_of_lanes(const LaneProbs<typename Values::E>& probs, int64_t rows, const Rows<In>* chunk,
                         int64_t keys, T* out, int64_t ldo, Prefetcher& ahead) {
  for (int64_t row = 0, count; row < rows; row += count) {
    count = rows_of_group(rows - row, probs.evenly);
    for_group(count, [&](auto few) {
      constexpr int R = few.value, kJoined = R - kLanes<T> % kMostValueRows;  // in the last group
      if constexpr (Values::kKeys == 1 && joins_values<T>(kJoined, kLanes<T> + kJoined))
        if (probs.joined && row + count == rows)
          return add_value_lanes<Values, R, kJoined>(probs, row, chunk, keys, out + row * ldo, ldo, ahead);
      add_value_lanes<Values, R, 0>(probs, row, chunk, keys, out + row * ldo, ldo, ahead);
    });
  }
}
