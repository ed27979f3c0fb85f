// S^T = K Q^T of decode for keys of int8 and blocks of more than 4 rows, on AVX2. Rows are lanes (decode_lanes-inl.h). Q is rounded to
// int16 (int16_rows-inl.h), and keys are widened to int16. A product multiplies pairs of columns: 16 multiplications, where one of
// float32 has 8.
#pragma once

#include "decode_bytes-inl.h"
#include "decode_integer_lanes-inl.h"

#if defined(FA_HAS_INTEGER_LANES) && !defined(FA_DOT_BYTES)

// out = factors * S^T for `keys` keys, kDotSums at a time. `k`: whole blocks of keys, [keys][pairs]. `q`: [pairs][lanes].
FA_NOINLINE inline void score_word_lanes(const Pair* q, int64_t pairs, const Pair* k, int64_t keys,
                                         F32 factors, float* out, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kDotSums;
  constexpr int64_t kUnroll = 4, kAtOnce = 32;  // pairs of a loop, and between prefetches
  KeyAddresses<Pair> address(k, pairs);
  float* to = out;
  for (int64_t j = 0; j < keys; j += N, to += N * L) {
    S32 sum[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[n] = S32{};
    const Pair* query = q;
    const auto add_pair = [&](int at) FA_INLINE_LAMBDA {
      const U32 of_rows = in_register(load_elements(query + at * L));
#pragma GCC unroll 16
      for (int n = 0; n < N; n += 2) {
        const U32 two[] = {broadcast_element(address.key(n) + at),
                           broadcast_element(address.key(n + 1) + at)};
        add_products<2>(sum + n, of_rows, two);
      }
    };
    for (int64_t pair = 0; pair < pairs;) {
      const int64_t end = std::min(pair + kAtOnce, pairs);
      ahead.lines(lines_of<int8_t>((end - pair) * 2 * N));
      const auto advance = [&](int64_t count) FA_INLINE_LAMBDA {
        address.advance(count * sizeof(Pair));
        query += count * L;
        pair += count;
      };
      while (pair + kUnroll <= end) {
#pragma GCC unroll 8
        for (int n = 0; n < kUnroll; ++n) add_pair(n);
        advance(kUnroll);
      }
      while (pair < end) {
        add_pair(0);
        advance(1);
      }
    }
    address.advance((N - 1) * address.ld);
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store<float>(to + n * L, (F32)sum[n]);
  }
  for (; out < to; out += L) store<float>(out, __builtin_convertvector((S32)load<float>(out), F32) * factors);
}

// Q of the task's heads as int16. A head has blocks of rows.
struct WordLanes {
  static constexpr int64_t kKeys = 64;  // keys that are widened at once

  Pair* q;           // [heads][blocks][D / 2][lanes]
  float* factors;    // [heads][blocks][lanes]   the scale of the scores, times the unit of each row
  int16_t* rounded;  // [lanes][D]   a block of rows of q
  int16_t* words;    // [kKeys][D]   widened keys
  int64_t cols;

  static WordLanes allocate(Arena& arena, const AttentionParams& p, int64_t heads) {
    WordLanes w{};
    if (p.varlen.cache.dtype != CacheDType::kInt8) return w;
    w.cols = p.sizes.head_dim;
    w.q = arena.take<Pair>(heads * IntegerLanes::kMostBlocks * w.block_pairs());
    w.factors = arena.take<float>(heads * IntegerLanes::kMostBlocks * kLanes<float>);
    w.rounded = arena.take<int16_t>(kLanes<float> * w.cols);
    w.words = arena.take<int16_t>(kKeys * w.cols);
    return w;
  }

  // Loads the rows of the task's head `n`. Rows of `from` are padded with zeros to whole vectors.
  void load_queries(int64_t n, int64_t rows, const float* from, int64_t ld, float scale) const {
    constexpr int64_t L = kLanes<float>;
    for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t count) {
      const int64_t block = IntegerLanes::block_of(n, first);
      for (int64_t r = 0; r < count; ++r)
        factors[block * L + r] = scale * round_query(from + (first + r) * ld, rounded + r * cols);
      std::fill(factors + block * L + count, factors + (block + 1) * L, 0.0f);
      load_query_lanes<float>(reinterpret_cast<const Pair*>(rounded), cols / 2, count, cols / 2,
                              q + block * block_pairs());
    });
  }

  // factor * S^T of head `n`, for `keys` keys. The first is key j of `to`.
  void load_scores(int64_t n, int64_t rows, const Rows<int8_t>& k, int64_t keys, float factor,
                   const LaneTile<float>& to, int64_t j, Prefetcher& ahead) const {
    constexpr int64_t L = kLanes<float>;
    Prefetcher nothing;
    for (int64_t j0 = 0; j0 < keys; j0 += kKeys) {
      const int64_t count = std::min(kKeys, keys - j0), whole = ceil_div(count, kDotSums) * kDotSums;
      for (int64_t i = 0; i < count; ++i) widen_key(k.row(j0 + i), words + i * cols);
      std::fill(words + count * cols, words + whole * cols, int16_t{0});
      for_each_lane_block<BFloat16, float>(rows, [&](int64_t first, int64_t some) {
        const int64_t block = IntegerLanes::block_of(n, first);
        const F32 of_lanes = load<float>(factors + block * L) * factor;
        score_word_lanes(q + block * block_pairs(), cols / 2, reinterpret_cast<const Pair*>(words), whole,
                         of_lanes, to.at(first, some, j + j0), first == 0 ? ahead : nothing);
      });
    }
  }

 private:
  int64_t block_pairs() const { return cols / 2 * kLanes<float>; }

  // Rounds a row of q. Returns its unit.
  float round_query(const float* from, int16_t* to) const {
    return round_row(from, cols, largest_of_query(cols), to);
  }
  void widen_key(const int8_t* from, int16_t* to) const {
    for (int64_t c = 0; c < cols; c += 2 * kLanes<float>)
      store_elements(reinterpret_cast<Pair*>(to + c), FA_WIDEN_INT8(from + c));
  }
};

#endif
