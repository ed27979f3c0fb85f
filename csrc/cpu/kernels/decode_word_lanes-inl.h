// S^T = K Q^T of decode for keys of int8 and int4, with rows as lanes (decode_lanes-inl.h), on AVX2. Q is rounded to int16
// (int16_rows-inl.h), and keys are widened to int16. A product multiplies pairs of columns: 16 multiplications, where one of
// float32 has 8. int4 has two planes of columns: first the even columns, then the odd columns.
#pragma once

#include "decode_bytes-inl.h"
#include "decode_integer_lanes-inl.h"

#if defined(FA_HAS_INTEGER_LANES) && !defined(FA_DOT_BYTES)

// out = factors * S^T for kDotSums keys, rows of `k` at distance `ld`. `bytes`: of a step of columns of the keys in memory.
template <int kSpan>
FA_NOINLINE void word_lanes_block(const Pair* q, int64_t steps, const Pair* k, int64_t ld, F32 factors,
                                  float* out, int64_t bytes, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kDotSums;
  constexpr int64_t kStepsAtOnce = 16 / kSpan;  // between prefetches
  S32 sum[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) sum[n] = S32{};
  KeyAddresses<Pair> keys(k, ld);
  for (int64_t step = 0; step < steps;) {
    const int64_t end = std::min(step + kStepsAtOnce, steps);
    ahead.lines(ceil_div((end - step) * bytes, 64));
    for (; step < end; ++step, q += L) {
      const U32 query = in_register(load_elements(q));
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[n] = multiply_add(sum[n], broadcast_span<kSpan>(keys.key(n)), query);
      keys.advance(kSpan * sizeof(Pair));
    }
  }
  F32 of_key[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) of_key[n] = __builtin_convertvector(sum[n], F32);
  sum_spans<float, kSpan, N>(of_key);
#pragma GCC unroll 16
  for (int n = 0; n < N / kSpan; ++n) store<float>(out + n * L, of_key[n] * factors);
}

// Q of the task's heads as int16. A head has one or two blocks of rows.
struct WordLanes : IntegerLanes {
  static constexpr int64_t kKeys = 64;  // keys that are widened at once

  Pair* q;           // [heads][blocks][D / 2][lanes]
  int16_t* rounded;  // [lanes][D]   a block of rows of q
  int16_t* words;    // [kKeys][D]   widened keys
  int16_t* row;      // [D]   a row of q, before its planes are separated

  static WordLanes allocate(Arena& arena, const AttentionParams& p, int64_t heads, int64_t block_k) {
    WordLanes w{};
    static_cast<IntegerLanes&>(w) = IntegerLanes::allocate(arena, p, heads, block_k);
    w.q = arena.take<Pair>(heads * kMostBlocks * w.block_pairs());
    w.rounded = arena.take<int16_t>(kLanes<float> * w.cols);
    w.words = arena.take<int16_t>(kKeys * w.cols);
    w.row = arena.take<int16_t>(round_up_to_lanes<float>(w.cols));
    return w;
  }

  // Loads the rows of the task's head `n`. Rows of `from` are padded with zeros to whole vectors.
  void load_queries(int64_t n, int64_t rows, const float* from, int64_t ld, float scale) const {
    constexpr int64_t L = kLanes<float>;
    for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t count) {
      const int64_t block = n * kMostBlocks + (first > 0), lanes = lanes_of<float>(count);
      for (int64_t r = 0; r < count; ++r)
        factors[block * L + r] = scale * round_query(from + (first + r) * ld, rounded + r * cols);
      for (int64_t i = count; i < L; ++i)  // the vectors of several keys repeat the rows
        factors[block * L + i] = i % lanes < count ? factors[block * L + i % lanes] : 0.0f;
      load_query_lanes<float>(reinterpret_cast<const Pair*>(rounded), cols / 2, count, cols / 2,
                              q + block * block_pairs());
    });
  }

  // factor * S^T of head `n`, for `keys` keys from key j of the tile on.
  void load_scores(int64_t n, int64_t rows, const Rows<int8_t>& k, int64_t j, int64_t keys, float factor,
                   const LaneTile<float>& to, Prefetcher& ahead) const {
    constexpr int64_t L = kLanes<float>;
    Prefetcher nothing;
    for (int64_t j0 = 0; j0 < keys; j0 += kKeys) {
      const int64_t count = std::min(kKeys, keys - j0), whole = ceil_div(count, kDotSums) * kDotSums;
      for (int64_t i = 0; i < count; ++i) widen_key(k.row(j0 + i), words + i * cols);
      std::fill(words + count * cols, words + whole * cols, int16_t{0});
      for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t some) {
        const int64_t block = n * kMostBlocks + (first > 0);
        const F32 of_lanes = load<float>(factors + block * L) * factor;
        for_any_span<float>(some, [&](auto span) {
          constexpr int kSpan = span.value;
          const int64_t steps = cols / (2 * kSpan);
          for (int64_t i = 0; i < whole; i += kDotSums)
            word_lanes_block<kSpan>(q + block * block_pairs(), steps,
                                    reinterpret_cast<const Pair*>(words + i * cols), cols / 2, of_lanes,
                                    to.at(first, some, j + j0 + i), kDotSums * key_bytes / steps,
                                    first == 0 ? ahead : nothing);
        });
      });
    }
  }

 private:
  int64_t block_pairs() const { return cols / 2 * kLanes<float>; }

  // Rounds a row of q. Returns its unit.
  float round_query(const float* from, int16_t* to) const {
    const float unit =
        round_row(from, cols, cols > 512 ? kLargestOfWideRow : kLargestInt16, planes == 1 ? to : row);
    if (planes == 2)
      for (int64_t c = 0; c < key_bytes; ++c) {
        to[c] = row[2 * c];
        to[key_bytes + c] = row[2 * c + 1];
      }
    return unit;
  }
  void widen_key(const int8_t* from, int16_t* to) const {
    const auto store_words = [](int16_t* at, U32 x)
                                 FA_INLINE_LAMBDA { store_elements(reinterpret_cast<Pair*>(at), x); };
    constexpr int64_t kWords = 2 * kLanes<float>;
    if (planes == 1) {
      for (int64_t c = 0; c < key_bytes; c += kWords) store_words(to + c, FA_WIDEN_INT8(from + c));
      return;
    }
    typedef int16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
    for (int64_t c = 0; c < key_bytes; c += kWords) {
      const Words bytes = (Words)FA_WIDEN_BYTES_TO_16(from + c),
                  zero = Words{} + static_cast<int16_t>(kInt4Zero);
      store_words(to + c, (U32)((bytes & 15) - zero));
      store_words(to + key_bytes + c, (U32)((bytes >> 4) - zero));
    }
  }
};

#endif
