// The two products of decode on int8 keys and values without conversion to 16-bit floats. For ISAs that multiply
// pairs of int16: widening a byte takes a fifth of the instructions of a conversion to bfloat16.
//
// Q and P are rounded to int16 (int16_rows-inl.h). The sums are exact: up to D 512 they stay below 2^31. Above
// it, the unit of a row of Q is (its largest magnitude) / 16383.
#pragma once

#include "decode_integer_lanes-inl.h"
#include "decode_products-inl.h"
#include "int16_rows-inl.h"

// Returns whether `rows` rows are multiplied by int8 without conversion, with columns as lanes.
template <class T>
bool multiplies_bytes(const AttentionParams& p, int64_t rows) {
#if defined(FA_DOT_BYTES)
  constexpr int64_t kMostRows = 0;
#else
  constexpr int64_t kMostRows = 16;
#endif
  return (rows <= kMostRows || !fills_lanes<T>(rows)) && !multiplies_integer_lanes(p, rows);
}

#if defined(FA_DOT_INT16)

// Returns the number that the largest magnitude of a row of Q becomes.
constexpr float largest_of_query(int64_t cols) { return cols > 512 ? 16383 : kLargestInt16; }
static_assert(int64_t{128} * 32767 * kMostDecodeKeys <=
              std::numeric_limits<int32_t>::max());  // P V of a tile

// The products. They do not depend on the type of Q, so both 16-bit types share this struct's functions.
struct ByteProducts {
  Pair* q;  // [rows][D / 2]   rows of all heads of the task
  int64_t ldq;
  float* q_factors;  // [rows]
  Pair* probs;       // [rows][block_k / 2]   pairs along the keys
  float* prob_factors;
  float* widened;  // [D]   a row of q
  int8_t* copy;    // [kChunkRows][D or D_v]   only if rows come from pages of odd sizes

  static ByteProducts allocate(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads,
                               int64_t block_k) {
    ByteProducts b{};
    if (p.varlen.cache.dtype != CacheDType::kInt8) return b;
    b.ldq = round_up_to_lanes<float>(pairs_of(p.sizes.head_dim));
    b.q = arena.take<Pair>(heads * rows * b.ldq);
    b.q_factors = arena.take<float>(heads * rows);
    b.probs = arena.take<Pair>(heads * rows * block_k / 2);
    b.prob_factors = arena.take<float>(heads * rows);
    b.widened = arena.take<float>(2 * b.ldq);
    b.copy = arena.take<int8_t>(kChunkRows * std::max(p.sizes.head_dim, p.sizes.head_dim_v));
    return b;
  }

  template <class In>
  void load_query(const AttentionParams& p, int64_t row, const In* src) const {
    const int64_t cols = p.sizes.head_dim;
    for (int64_t c = 0; c < 2 * ldq; c += kLanes<float>)
      store<float>(widened + c, c < cols ? load_columns<float>(src + c, cols - c) : F32{});
    q_factors[row] =
        round_row(widened, 2 * ldq, largest_of_query(cols), reinterpret_cast<int16_t*>(q + row * ldq));
  }

  // scores[r][n] = scale * <q[r], k[n]> without the units of q, as DecodeProducts::scores().
  template <int R>
  FA_NOINLINE void scores(int64_t row, const Rows<int8_t>& k, int64_t keys, float scale, float* out,
                          int64_t ld, int64_t room, Prefetcher& ahead) const {
    const auto load = [](const int8_t* p, int64_t n) FA_INLINE_LAMBDA { return load_pairs(p, n); };
    for (int64_t j = 0; j < keys; j += kDotSums / R)
      dot_block<float, R, 2 * kLanes<float>, S32>(q + row * ldq, ldq, k, j, keys, scale, out, ld, room, load,
                                                  ahead);
  }

  FA_NOINLINE void finish_probs(int64_t row, int64_t rows, const float* p, int64_t ld) const {
    for (int64_t r = row; r < row + rows; ++r)
      prob_factors[r] =
          round_row(p + r * ld, ld, kLargestInt16, reinterpret_cast<int16_t*>(probs + r * ld / 2));
  }

  // As DecodeProducts::add_values(). The sums are integers: add_sums() multiplies them by the units of P.
  template <int R>
  FA_NOINLINE void add_values(int64_t row, int64_t j, int64_t ld, const Rows<int8_t>& v, int64_t keys,
                              int32_t* sum, int64_t ldo, Prefetcher& ahead) const {
    add_value_pairs<R>(probs + (row * ld + j) / 2, ld / 2, v, keys, sum, ldo, ahead);
  }
  void add_sums(int64_t row, const int32_t* sums, float* out, int64_t cols) const {
    for (int64_t c = 0; c < cols; c += kLanes<float>)
      store<float>(out + c, load<float>(out + c) +
                                __builtin_convertvector(load_sums(sums + c), F32) * prob_factors[row]);
  }
};

template <class In>
struct DecodeBytes : ByteProducts {
  static constexpr bool kExists = sizeof(In) == 2;  // float32 is more exact than int16

  static DecodeBytes allocate(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads,
                              int64_t block_k) {
    if (!kExists) return {};
    return {ByteProducts::allocate(arena, p, rows, heads, block_k)};
  }
};

#else

template <class In>
struct DecodeBytes {
  static constexpr bool kExists = false;
  static DecodeBytes allocate(Arena&, const AttentionParams&, int64_t, int64_t, int64_t) { return {}; }
};

#endif
