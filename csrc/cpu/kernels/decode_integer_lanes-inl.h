// int8 and int4 caches of decode with rows as lanes, without a conversion to floats: when they are used, and the product with V.
// S^T = K Q^T is in decode_byte_lanes-inl.h, decode_word_lanes-inl.h and decode_nibble_lanes-inl.h.
//
// O += P V: P is rounded to int16 (int16_rows-inl.h), and pairs of keys are multiplied (decode_lane_values-inl.h). With groups g of
// columns, scales s, zero points z and nibbles n, int4 has
//
//   O_c = sum_j (P_j s_jg) n_jc - sum_j P_j s_jg z_jg             g: the group of column c
//
// P s is rounded for each group. Without zero points, z is 8, and the second sum adds the rounded P s.
#pragma once

#include "decode_groups-inl.h"
#include "decode_many_rows-inl.h"
#include "int16_rows-inl.h"
#include "softmax-inl.h"

// AVX-512 BF16 multiplies bytes of keys. AVX2 multiplies bytes of int4 keys, and words of int8 keys. Other instruction sets have other
// forms.
#if defined(FA_DOT_BYTES) || (FA_VECTOR_BYTES == 32 && defined(FA_DOT_INT16))
#define FA_HAS_INTEGER_LANES
constexpr bool kHasIntegerLanes = true;
#else
constexpr bool kHasIntegerLanes = false;
#endif

// Whether a row of int4 has several scales, or zero points. A single scale multiplies scores or probabilities.
inline bool has_groups_of(const CacheGroups& groups) { return groups.count > 1 || groups.zeros; }

// Whether products of rows as lanes exist for keys or values of a cache. AVX-512 BF16 converts int4 with groups or zero points by
// lookups, because lookups are few instructions.
inline bool has_integer_lanes(const CacheParams& cache, const CacheGroups& groups) {
  return cache.dtype == CacheDType::kInt8 ||
         (cache.dtype == CacheDType::kInt4 && (FA_VECTOR_BYTES == 32 || !has_groups_of(groups)));
}

// Whether these products exist for the keys of a call.
inline bool has_integer_keys(const AttentionParams& p) {
  const CacheParams& cache = p.varlen.cache;
  const int64_t columns_at_once = cache.dtype == CacheDType::kInt4 ? 32 : 16;
  return kHasIntegerLanes && has_integer_lanes(cache, cache.k_groups) &&
         p.sizes.head_dim % columns_at_once == 0;
}
// With 24 and 32 rows on AVX2, calls take 0.73 of the time of a conversion to float32 with int8, and 0.54 to 0.67 with int4 (Zen 3).
constexpr int64_t kMostIntegerRows = FA_VECTOR_BYTES == 32 ? 32 : 16;

// Whether the keys of a call are multiplied by `rows` rows of 16 bits as integers, with rows as lanes.
inline bool multiplies_integer_lanes(const AttentionParams& p, int64_t rows) {
  return has_integer_keys(p) && rows <= kMostIntegerRows && fills_lanes<float>(rows) &&
         uses_lane_blocks<float>(rows);
}

// The same for the values. Only if also the keys are.
inline bool multiplies_integer_values(const AttentionParams& p, int64_t rows) {
  const CacheParams& cache = p.varlen.cache;
  if (!multiplies_integer_lanes(p, rows) || !has_integer_lanes(cache, cache.v_groups)) return false;
  if (cache.dtype == CacheDType::kInt8) return true;
  // Each group of rows widens nibbles again. On AVX-512 BF16, several groups do not pay.
  return p.sizes.head_dim_v % (2 * kLanes<float>) == 0 && (FA_VECTOR_BYTES == 32 || rows <= kMostValueRows);
}

// The factors of a head's values from one key on: a factor of each key and group.
struct ValueFactors {
  const float* scales = nullptr;    // [groups][ld]   null: 1
  const float* products = nullptr;  // likewise: scales times zero points. null: the zero points are kInt4Zero
  int64_t groups = 1, ld = 0;
};

#if defined(FA_HAS_INTEGER_LANES)

// A row of Q as bytes: x = 256 high + low, both signed. The largest x has the high byte 127.
constexpr float kLargestOfTwoBytes = 127 * 256 + 127;

// Writes the low and the high byte of every kStride-th word. Without __restrict bytes may alias anything, so the compiler would
// use no vectors.
template <int kStride>
void split_words(const int16_t* __restrict words, int64_t count, int8_t* __restrict low,
                 int8_t* __restrict high) {
  for (int64_t c = 0; c < count; ++c) {
    const int16_t x = words[c * kStride];
    low[c] = static_cast<int8_t>(x);
    high[c] = static_cast<int8_t>((x + 128) >> 8);
  }
}
// Writes a row of words as bytes, [planes of columns][high, low][columns of a plane].
template <int kPlanes>
void split_row(const int16_t* words, int64_t cols, int8_t* bytes) {
  const int64_t of_plane = cols / kPlanes;
  for (int plane = 0; plane < kPlanes; ++plane)
    split_words<kPlanes>(words + plane, of_plane, bytes + (2 * plane + 1) * of_plane,
                         bytes + 2 * plane * of_plane);
}

// The even and the odd columns become two vectors of neighbouring columns.
FA_INLINE void join_columns(S32* sum) {
  F32 even = (F32)sum[0], odd = (F32)sum[1];
  interleave_lanes<float>(even, odd);
  sum[0] = (S32)even;
  sum[1] = (S32)odd;
}

#if FA_VECTOR_BYTES == 32

// The even and the odd columns of a quarter of 64 columns, as PairNibbles: bytes 4 n to 4 n + 3 of each half of 32 bytes. Bytes of two
// keys alternate, and then each byte is twice in its word. PairNibbles takes 9 instructions, this struct takes 4.
template <int kQuarter>
struct QuarterOfNibbles {
  using E = Pair;
  using Sum = S32;
  static constexpr int kKeys = 2, kVectors = 2, kColumnsOfElement = 2;
  // The first 8 sums are columns of the first 32, the others of the last 32.
  static constexpr int64_t column_of(int64_t n) { return 8 * kQuarter + 4 * n; }
  FA_INLINE static void load(const int8_t* v, int64_t stride, bool is_last, int64_t, U32* value) {
    typedef uint16_t Words __attribute__((vector_size(FA_VECTOR_BYTES)));
    const auto bytes_of = [](const int8_t* row)
                              FA_INLINE_LAMBDA { return load_elements(reinterpret_cast<const Pair*>(row)); };
    const U32 first = bytes_of(v), second = is_last ? U32{} : bytes_of(v + stride);
    const auto both = kQuarter < 2 ? FA_UNPACK8_LOW(first, second) : FA_UNPACK8_HIGH(first, second);
    const auto words = (Words)(kQuarter % 2 == 0 ? FA_UNPACK8_LOW(both, both) : FA_UNPACK8_HIGH(both, both));
    value[0] = (U32)(words & 15);
    value[1] = (U32)(words >> 12);
  }
  FA_INLINE static void order_columns(S32* sum) { join_columns(sum); }
};

#endif

// Values of int4, without the offset, as pairs of int16 across two keys: the even and the odd columns.
struct PairNibbles : NeighbouringColumns {
#if FA_VECTOR_BYTES == 32
  static constexpr int kParts = 4;
  template <int n>
  using Part = QuarterOfNibbles<n>;
#endif
  using E = Pair;
  using Sum = S32;
  static constexpr int kKeys = 2, kVectors = 2, kColumnsOfElement = 2;
  FA_INLINE static void load(const int8_t* v, int64_t stride, bool is_last, int64_t, U32* value) {
    const auto bytes_of = [](const int8_t* row) FA_INLINE_LAMBDA {
      return widen(*reinterpret_cast<const UnalignedBytes*>(row));
    };
    const U32 bytes = is_last ? bytes_of(v) : bytes_of(v) | bytes_of(v + stride) << 16;
    value[0] = bytes & 0x000f000fu;
    value[1] = bytes >> 4 & 0x000f000fu;
  }
  FA_INLINE static void order_columns(S32* sum) { join_columns(sum); }
};

// Loads the scales of int4 rows with one group, as load_factors().
inline bool load_scales(const AttentionParams& p, const CacheGroups& groups, int64_t h_kv, int64_t j0,
                        int64_t keys, int64_t ld, float* factors) {
  std::fill(factors, factors + ld, 1.0f);
  return TileGroups{factors, nullptr}.load_runs(p, groups, h_kv, j0, keys);
}

struct IntegerLanes {
  static constexpr int64_t kMostBlocks = FA_VECTOR_BYTES == 32 ? 4 : 2;  // of rows of a head

  // Returns the number of a block among the blocks of all heads. The block has the rows of head `n` from `first_row` on.
  static int64_t block_of(int64_t n, int64_t first_row) {
    return n * kMostBlocks + ceil_div(first_row, int64_t{kLanes<float>});
  }

  int8_t* copy;  // [keys of a tile][bytes of a key or value]   only for pages of odd sizes, and the last keys
  Pair* probs;   // [block_k / 2][lanes]   P^T of a block of rows as int16
  int64_t cols, key_bytes, value_bytes;
  int planes;  // of columns: int4 has two, the even and the odd columns

  static IntegerLanes allocate(Arena& arena, const AttentionParams& p, int64_t block_k) {
    IntegerLanes b{};
    b.cols = p.sizes.head_dim;
    b.planes = p.varlen.cache.dtype == CacheDType::kInt4 ? 2 : 1;
    b.key_bytes = b.cols / b.planes;
    b.value_bytes = p.sizes.head_dim_v / b.planes;
    const int64_t whole = whole_chunks(block_k);
    b.copy = arena.take<int8_t>(whole * std::max(b.key_bytes, b.value_bytes));
    b.probs = arena.take<Pair>(whole / 2 * kLanes<float>);
    return b;
  }

  // out += factor * P V for `keys` keys from all.first_key on. `v`: their chunks.
  template <class In>
  void add_values(const ManyRows<In, float>& many, const AllProbs<float>& all, float factor,
                  const ValueFactors& factors, int64_t rows, const Rows<int8_t>* v, int64_t keys, float* out,
                  int64_t ldo, Prefetcher& ahead) const {
    const int64_t bytes = value_bytes / factors.groups;  // of a group
    Rows<int8_t> of_group[kTileChunks];
    for_each_lane_block<In, float>(rows, [&](int64_t first, int64_t count) {
      const float* p = many.block_of(all, first, count, keys);
      for (int64_t g = 0; g < factors.groups; ++g) {
        for (int64_t j = 0; j < keys; j += kChunkRows) {
          const Rows<int8_t>& chunk = v[j / kChunkRows];
          of_group[j / kChunkRows] = {chunk.data + g * bytes, chunk.stride, bytes};
        }
        add_group({p, keys, lanes_of<float>(count), count}, factor, factors, g, of_group,
                  out + first * ldo + g * bytes * planes, ldo, ahead);
      }
    });
  }

 private:
  // P^T of a block of rows, [whole chunks of keys][lanes].
  struct BlockProbs {
    const float* data;
    int64_t keys, lanes, rows;

    int64_t whole() const { return whole_chunks(keys); }
  };

  // As add_values(), for the columns of one group.
  void add_group(const BlockProbs& p, float factor, const ValueFactors& factors, int64_t g,
                 const Rows<int8_t>* v, float* out, int64_t ldo, Prefetcher& ahead) const {
    float units[kLanes<float>];
    int32_t starts[kLanes<float>] = {};
    const float* scales = factors.scales ? factors.scales + g * factors.ld : nullptr;
    for_any_span<float>(p.rows, [&](auto span) { round_probs<span.value>(p, scales, factor, units); });
    const auto add = [&](auto values, const int32_t* from) {
      add_values_of_lanes<decltype(values)>({probs, p.lanes, units, from}, p.rows, v, p.keys, out, ldo,
                                            ahead);
    };
    if (planes == 1) return add(PairValues<int8_t, S32>{}, nullptr);
    if (!factors.products) sum_probs(p, starts);
    add(PairNibbles{}, starts);
    if (factors.products)
      for_any_span<float>(p.rows, [&](auto span) {
        subtract_zeros<span.value>(p, factors.products + g * factors.ld, v->cols * planes, out, ldo);
      });
  }

  // starts = -(the offset of nibbles) * (the sum of the rounded P of each row).
  void sum_probs(const BlockProbs& p, int32_t* starts) const {
    constexpr int L = kLanes<float>;
    S32 sum = {};
    for (int64_t n = 0; n < p.whole() / 2 * p.lanes; n += L)
      sum = multiply_add(sum, U32{} + 0x00010001u, load_elements(probs + n));
    for (int d = L / 2; d >= p.lanes; d /= 2) sum += (S32)rotate<float>((F32)sum, d);
    store<float>(reinterpret_cast<float*>(starts), (F32)(sum * -static_cast<int32_t>(kInt4Zero)));
  }

  // out[r][c] -= sum_j P[r][j] products[j], for all columns of a group.
  template <int kSpan>
  static void subtract_zeros(const BlockProbs& p, const float* products, int64_t cols, float* out,
                             int64_t ldo) {
    constexpr int L = kLanes<float>;
    F32 sum = {};
    for_each_two<kSpan>(p, products,
                        [&](int64_t, F32 first, F32 second) FA_INLINE_LAMBDA { sum += first + second; });
    for (int d = L / 2; d >= L / kSpan; d /= 2) sum += rotate<float>(sum, d);
    for (int64_t r = 0; r < p.rows; ++r)
      for (int64_t c = 0; c < cols; c += L) {
        float* to = out + r * ldo + c;
        store<float>(to, load<float>(to) - sum[r]);
      }
  }

  // Calls body(n, P times factors) for two vectors of P^T at a time, from element n on. null factors: 1.
  template <int kSpan, class Body>
  FA_INLINE static void for_each_two(const BlockProbs& p, const float* factors, const Body& body) {
    constexpr int L = kLanes<float>, kBlockLanes = L / kSpan;
    for (int64_t j = 0; j < p.whole(); j += L)
#pragma GCC unroll 8
      for (int v = 0; v < kBlockLanes; v += 2) {
        const int64_t n = j * kBlockLanes + v * L;
        const F32 first = load<float>(p.data + n), second = load<float>(p.data + n + L);
        factors ? body(n, first * key_factors<float, kSpan>(factors + j, v),
                       second * key_factors<float, kSpan>(factors + j, v + 1))
                : body(n, first, second);
      }
  }

  // Rounds P^T of a block, [keys][lanes], times the factors of its keys, to pairs of keys, [keys / 2][lanes]. Sets factor *
  // (the unit of each row).
  template <int kSpan>
  void round_probs(const BlockProbs& p, const float* factors, float factor, float* units) const {
    constexpr int L = kLanes<float>, kBlockLanes = L / kSpan;
    constexpr float kToWhole = 0x1.8p23f, kMost = std::numeric_limits<float>::max();
    // Magnitudes compare like their bits. Inf and NaN compare above all finite numbers.
    S32 highest = {};
    const auto take = [&](S32 x) FA_INLINE_LAMBDA { highest = x > highest ? x : highest; };
    for_each_two<kSpan>(p, factors, [&](int64_t, F32 first, F32 second) FA_INLINE_LAMBDA {
      take((S32)first & 0x7fffffff);
      take((S32)second & 0x7fffffff);
    });
    for (int d = L / 2; d >= kBlockLanes; d /= 2) take((S32)rotate<float>((F32)highest, d));
    const F32 largest = (F32)highest, zero = {};
    const auto is_number = largest > zero && largest <= splat<float>(kMost);
    F32 inverse = kLargestInt16 / largest;
    inverse = inverse > splat<float>(kMost) ? splat<float>(kMost) : inverse;
    const F32 if_none = largest == zero ? zero : splat<float>(std::numeric_limits<float>::quiet_NaN());
    store<float>(units, is_number ? factor / inverse : if_none);
    inverse = is_number ? inverse : zero;
    const KeysOfLanes key(kBlockLanes);
    for_each_two<kSpan>(p, factors, [&](int64_t n, F32 first, F32 second) FA_INLINE_LAMBDA {
      const F32 whole[2] = {first * inverse + kToWhole, second * inverse + kToWhole};
      store_elements(probs + n / 2, ((U32)pick<float>(whole[0], whole[1], key.even) & 0xffffu) |
                                        (U32)pick<float>(whole[0], whole[1], key.odd) << 16);
    });
  }
};

#endif
