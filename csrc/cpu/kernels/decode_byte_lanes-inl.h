// S^T = K Q^T of decode for keys of int8 and int4, with rows as lanes (decode_lanes-inl.h). A product multiplies four bytes of a
// key by four bytes of Q in each lane, so keys are not converted.
//
// A row of Q is rounded to int16 (int16_rows-inl.h), and q = 256 high + low with two bytes. Both are signed, and the bytes of a
// key are unsigned: int8 + 128, or the nibbles of int4. With the offset z, 128 or 8, and the unit u of the row:
//
//   S = u (256 sum_c high_c (k_c + z) + sum_c low_c (k_c + z) - z (256 sum_c high_c + sum_c low_c))
//
// The sums of integers are exact. A lane has kSpan units of four bytes of a key. int4 has two planes: even and odd columns.
#pragma once

#include "decode_integer_lanes-inl.h"

#if defined(FA_DOT_BYTES)

// Products of a step of columns. `q`: [planes][high, low] of vectors. `bytes`: the units of a key in all lanes.
template <int kPlanes>
FA_INLINE void multiply_bytes(const U32 (&q)[kPlanes][2], U32 bytes, S32& high, S32& low) {
  const U32 unsigned_bytes[2] = {kPlanes == 1 ? bytes ^ 0x80808080u : bytes & 0x0f0f0f0fu,
                                 bytes >> 4 & 0x0f0f0f0fu};
#pragma GCC unroll 2
  for (int n = 0; n < kPlanes; ++n) {
    high = FA_DOT_BYTES(high, unsigned_bytes[n], q[n][0]);
    low = FA_DOT_BYTES(low, unsigned_bytes[n], q[n][1]);
  }
}

constexpr int kByteKeys = kDotSums / 2;  // keys at a time: each has two sums

// out = factors * S^T for kByteKeys keys at distance `ld`. `start`: the first sums, [high, low].
template <int kSpan, int kPlanes>
FA_INLINE void byte_lanes_block(const int8_t* q, int64_t steps, const float* start, const int8_t* k,
                                int64_t ld, F32 factors, float* out, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kByteKeys;
  S32 high[N], low[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    high[n] = (S32)load<float>(start);
    low[n] = (S32)load<float>(start + L);
  }
  const int8_t* key[2] = {k, k + 4 * ld};
  int64_t ld3 = 3 * ld;
  asm volatile("" : "+r"(ld3));  // in a register, not computed for each key
  for (int64_t step = 0; step < steps; ++step, q += kPlanes * 2 * FA_VECTOR_BYTES) {
    if (step % 4 == 0) ahead.lines(4 * N * kSpan * 4 / 64);  // of four steps
    U32 query[kPlanes][2];
#pragma GCC unroll 4
    for (int n = 0; n < 2 * kPlanes; ++n)
      query[n / 2][n % 2] = load_elements(reinterpret_cast<const Pair*>(q + n * FA_VECTOR_BYTES));
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const int8_t* unit = key[n / 4] + (n % 4 == 3 ? ld3 : n % 4 * ld) + step * 4 * kSpan;
      multiply_bytes<kPlanes>(query, broadcast_span<kSpan>(reinterpret_cast<const Pair*>(unit)), high[n],
                              low[n]);
    }
  }
  F32 sum[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n)
    sum[n] = __builtin_convertvector(high[n], F32) * 256.0f + __builtin_convertvector(low[n], F32);
  store_span_sums<float, kSpan>(sum, factors, out);
}

// Q of the task's heads as bytes. A head has one or two blocks of rows.
struct ByteLanes : IntegerLanes {
  static constexpr bool kHasGroups = false;

  int8_t* q;       // [heads][blocks][steps][planes][high, low][lanes][4]
  float* starts;   // [heads][blocks][high, low][lanes]   int32
  float* widened;  // [D]   a row of q
  int16_t* rounded;
  int8_t* bytes;   // [planes][high, low][D / planes]   a row of q
  float* factors;  // [heads][blocks][lanes]   the scale of the scores, times the unit of each row
  int64_t block_bytes;

  static ByteLanes allocate(Arena& arena, const AttentionParams& p, int64_t heads, int64_t block_k) {
    ByteLanes b{};
    static_cast<IntegerLanes&>(b) = IntegerLanes::allocate(arena, p, block_k);
    b.block_bytes = 2 * b.cols * kLanes<float>;  // with kSpan 1
    b.q = arena.take<int8_t>(heads * kMostBlocks * b.block_bytes);
    b.starts = arena.take<float>(heads * kMostBlocks * 2 * kLanes<float>);
    b.widened = arena.take<float>(round_up_to_lanes<float>(b.cols));
    b.rounded = arena.take<int16_t>(round_up_to_lanes<float>(b.cols));
    b.bytes = arena.take<int8_t>(2 * b.cols);
    b.factors = arena.take<float>(heads * kMostBlocks * kLanes<float>);
    return b;
  }

  // Loads the rows of the task's head `n`.
  void load_queries(int64_t n, int64_t rows, const Pair* pairs, int64_t ld_pairs, float scale) const {
    const auto* from = reinterpret_cast<const BFloat16*>(pairs);
    const int64_t ld = 2 * ld_pairs;
    for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t count) {
      const int64_t block = block_of(n, first);
      for_span<float>(count, [&](auto span) {
        planes == 1 ? load_block<span.value, 1>(block, from + first * ld, ld, count, scale)
                    : load_block<span.value, 2>(block, from + first * ld, ld, count, scale);
      });
    });
  }

  // factor * S^T of head `n`, for `keys` keys. The first is key j of `to`.
  void load_scores(int64_t n, int64_t rows, Rows<int8_t> k, int64_t, int64_t keys, float factor,
                   const LaneTile<float>& to, int64_t j, Prefetcher& ahead) const {
    constexpr int64_t L = kLanes<float>;
    if (keys % kByteKeys != 0 && k.data != copy) {  // a block may not read past the last key
      for (int64_t i = 0; i < keys; ++i) std::memcpy(copy + i * key_bytes, k.row(i), key_bytes);
      k = {copy, key_bytes, key_bytes};
    }
    for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t count) {
      const int64_t block = block_of(n, first);
      for_span<float>(count, [&](auto span) {
        constexpr int kSpan = span.value;
        const F32 of_lanes = load<float>(factors + block * L) * factor;
        const auto load_block = [&](auto some) {
          for (int64_t i = 0; i < keys; i += kByteKeys)
            byte_lanes_block<kSpan, some.value>(q + block * block_bytes, key_bytes / (4 * kSpan),
                                                starts + block * 2 * L, k.row(i), k.stride, of_lanes,
                                                to.at(first, count, j + i), ahead);
        };
        planes == 1 ? load_block(std::integral_constant<int, 1>{})
                    : load_block(std::integral_constant<int, 2>{});
      });
    });
  }

 private:
  template <int kSpan, int kPlanes>
  void load_block(int64_t block, const BFloat16* from, int64_t ld, int64_t rows, float scale) const {
    constexpr int L = kLanes<float>;
    int8_t* to = q + block * block_bytes;
    auto* start = reinterpret_cast<int32_t*>(starts + block * 2 * L);
    std::fill(start, start + 2 * L, 0);
    for (int64_t r = 0; r < L / kSpan; ++r) {
      if (r >= rows) std::fill(bytes, bytes + 2 * cols, int8_t{0});
      const float factor = r < rows ? scale * round_query<kPlanes>(from + r * ld) : 0.0f;
      for (int64_t i = r; i < L; i += L / kSpan) factors[block * L + i] = factor;
      for (int part = 0; part < 2 * kPlanes; ++part) {
        const int8_t* own = bytes + part * key_bytes;
        int32_t sum = 0;
        for (int64_t c = 0; c < key_bytes; ++c) sum += own[c];
        start[part % 2 * L + r * kSpan] -= (kPlanes == 1 ? 128 : static_cast<int32_t>(kInt4Zero)) * sum;
        int8_t* lane = to + (part * L + r * kSpan) * 4;
        for (int64_t c = 0; c < key_bytes; c += 4 * kSpan, lane += 2 * kPlanes * L * 4)
          std::memcpy(lane, own + c, 4 * kSpan);
      }
    }
  }

  // Rounds a row of q to bytes. Returns its unit.
  template <int kPlanes>
  float round_query(const BFloat16* from) const {
    for (int64_t c = 0; c < cols; c += kLanes<float>)
      store<float>(widened + c, load_columns<float>(from + c, cols - c));
    const float unit = round_row(widened, cols, kLargestOfTwoBytes, rounded);
    split_row<kPlanes>(rounded, cols, bytes);
    return unit;
  }
};

#endif
