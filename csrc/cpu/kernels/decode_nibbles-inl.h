// The two products of decode on int4 keys and values without conversion to floats, for 16-bit queries on instruction sets
// that multiply pairs of int16. With groups g of columns, scales s, zero points z and nibbles n:
//
//   S_j = sum_g s_jg (sum_c q_c n_jc - z_jg sum_c q_c)          c: the columns of group g
//   O_c = sum_j P_j s_jg n_jc - sum_j P_j s_jg z_jg             g: the group of column c
//
// Q, and P s of each group, are rounded to int16 (int16_rows-inl.h). Sums of nibbles are exact. A step is 4 * kLanes columns:
// bytes become words, and two operations separate the even and the odd columns.
#pragma once

#include "decode_integer_lanes-inl.h"
#include "decode_products-inl.h"

// Returns whether `rows` rows are multiplied by int4 without conversion, with columns as lanes. More rows are lanes if a conversion
// to bfloat16 takes few instructions. Otherwise they are lanes if each row of the cache would be read again too often.
template <class In, class T>
bool multiplies_nibbles(const AttentionParams& p, int64_t rows) {
  const int64_t most = kLooksUpNibbles && std::is_same_v<In, BFloat16> ? 0 : 32;
  return (rows <= most || !fills_lanes<T>(rows)) && !multiplies_integer_lanes(p, rows);
}

#if defined(FA_MULTIPLY_INT16)

constexpr int kStep = 4 * kLanes<float>;  // columns
typedef uint16_t Int16Words __attribute__((vector_size(FA_VECTOR_BYTES)));
typedef uint16_t UnalignedInt16Words __attribute__((vector_size(FA_VECTOR_BYTES), aligned(2), may_alias));

// Loads one step of a row of bytes as words, padded with zeros. `bytes`: from p to the end of the row.
FA_INLINE Int16Words load_words(const uint8_t* p, int64_t bytes) {
  constexpr int64_t kMost = kStep / 2;
  if (bytes >= kMost) return (Int16Words)FA_WIDEN_BYTES_TO_16(p);
  uint8_t buffer[kMost] = {};
  std::memcpy(buffer, p, bytes);
  return (Int16Words)FA_WIDEN_BYTES_TO_16(buffer);
}

// The groups of a row of K or V.
struct GroupsOfRow {
  int64_t count, whole;  // the number of groups; rounded up to whole vectors
  int64_t columns;       // the columns of a group
};

// The group of a step of columns. Steps are in order, so the next group needs no division.
struct GroupOfStep {
  // With groups of 32 columns and vectors of 64 bytes, a step has two groups. Each half of the lanes belongs to one
  // group.
  static constexpr bool kMayBeTwo = kStep > 32;

  int64_t columns, group = 0, next = columns;  // next: the first column of the next group
  bool two = false;

  FA_INLINE void advance_to(int64_t c) {
    while (c >= next) ++group, next += columns;
    if constexpr (kMayBeTwo) two = c + kStep / 2 >= next;
  }
  // number(g) in the lanes of each column.
  template <class V, class Number>
  FA_INLINE V lanes(const Number& number) const {
    const V first = V{} + number(group);
    if constexpr (kMayBeTwo) {
      const V second = two ? V{} + number(group + 1) : first;
      return iota<float>() < kLanes<float> / 2 ? first : second;
    }
    return first;
  }
};

// scores[r][n] = scale * <q[r], k[n]> without the units of q, for R rows and kDotSums / R keys from j on. As dot_block().
template <int R>
FA_INLINE void nibble_scores(const int16_t* q, int64_t ldq, const float* q_sums, const Rows<uint8_t>& k,
                             const TileGroups& groups, const GroupsOfRow& row_groups, int64_t j, int64_t keys,
                             float scale, float* scores, int64_t ld, int64_t room, Prefetcher& ahead) {
  constexpr int L = kLanes<float>, N = kDotSums / R;
  const uint8_t* key_row[N];
  const float* scales[N];
  F32 sum[R][N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) {
    const int64_t at = std::min<int64_t>(j + n, keys - 1);
    key_row[n] = k.row(at);
    scales[n] = groups.scales + at * row_groups.count;
    const float* products = (groups.products ? groups.products : groups.scales) + at * row_groups.count;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      sum[r][n] = F32{};
      for (int64_t g = 0; g < row_groups.whole; g += L)
        sum[r][n] -= load<float>(products + g) * load<float>(q_sums + r * row_groups.whole + g);
    }
  }
  GroupOfStep group{row_groups.columns};
  for (int64_t c = 0; c < k.cols; c += kStep) {
    group.advance_to(c);
    ahead.lines(lines_of<uint8_t>(N * kStep / 2));
    const int16_t* q_step = q + c;
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      const Int16Words words = load_words(key_row[n] + c / 2, (k.cols - c) / 2);
      const Int16Words even = words & 15, odd = words >> 4;
      const F32 factor = group.lanes<F32>([&](int64_t g) FA_INLINE_LAMBDA { return scales[n][g]; });
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const UnalignedInt16Words* columns = reinterpret_cast<const UnalignedInt16Words*>(q_step + r * ldq);
        const S32 product = FA_MULTIPLY_INT16(columns[0], even) + FA_MULTIPLY_INT16(columns[1], odd);
        sum[r][n] += __builtin_convertvector(product, F32) * factor;
      }
    }
  }
  store_dots<float, R, N>(sum, scale, scores + j, ld, room - j);
}

// sums[r][...] += sum_j (P s)[r][j] n[j][c] for R rows and the step of columns from c on. `probs`: [R][groups][ld].
template <int R>
FA_INLINE void nibble_values(const int16_t* probs, int64_t ld, const Rows<uint8_t>& v, int64_t groups,
                             const GroupOfStep& group, int64_t c, int64_t keys, int32_t* sums,
                             int64_t ld_sums, Prefetcher& ahead) {
  constexpr int L = kLanes<float>;
  typedef int32_t UnalignedS32 __attribute__((vector_size(FA_VECTOR_BYTES), aligned(4), may_alias));
  S32 sum[R][4];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n)
      sum[r][n] = *reinterpret_cast<const UnalignedS32*>(sums + r * ld_sums + c + n * L);
  const int64_t bytes = (v.cols - c) / 2;
  for (int64_t j = 0; j < keys; j += 2) {
    if (j % 4 == 0) ahead.lines(lines_of<uint8_t>(2 * kStep));  // four keys
    const Int16Words low = load_words(v.row(j) + c / 2, bytes);
    const Int16Words high = j + 1 < keys ? load_words(v.row(j + 1) + c / 2, bytes) : Int16Words{};
    const Int16Words first = (Int16Words)FA_UNPACK16_LOW(low, high),
                     second = (Int16Words)FA_UNPACK16_HIGH(low, high);
    const Int16Words value[4] = {first & 15, first >> 4, second & 15, second >> 4};
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const S32 prob = group.lanes<S32>([&](int64_t g) FA_INLINE_LAMBDA {
        int32_t pair;
        std::memcpy(&pair, probs + (r * groups + g) * ld + j, sizeof(pair));
        return pair;
      });
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) sum[r][n] += FA_MULTIPLY_INT16(prob, value[n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) *reinterpret_cast<UnalignedS32*>(sums + r * ld_sums + c + n * L) = sum[r][n];
}

struct DecodeNibbles {
  template <class In>
  static constexpr bool kExists = sizeof(In) == 2;  // float32 is more exact than int16

  int16_t*
      q;  // [rows][ldq]   rows of all heads of the task. A step has its even columns, then its odd columns
  int64_t ldq;
  float* q_units;     // [rows]
  float* q_sums;      // [rows][groups of a key]   sums of q, times kInt4Zero if there are no zero points
  float* widened;     // [D]   a row of q
  TileGroups keys;    // [heads]
  TileGroups values;  // of one head
  float* transposed;  // [2][groups of a value][block_k]   the scales of the values, and the products
  float* scaled;      // [block_k]   P s of one row and group
  int16_t* probs;     // [rows][groups of a value][block_k]
  float* prob_units;  // [rows][groups of a value]
  float* offsets;     // likewise: sum_j P_j s_jg z_jg
  int32_t* sums;      // [rows][ld_sums]   four vectors for each step: nibble_values()
  int64_t ld_sums, block_k;
  int8_t* copy;  // [kChunkRows][bytes]   only if rows come from pages of odd sizes
  GroupsOfRow of_key, of_value;

  static GroupsOfRow of_groups(const CacheGroups& groups) {
    return {groups.count, round_up_to_lanes<float>(groups.count), groups.columns};
  }

  static DecodeNibbles allocate(Arena& arena, const AttentionParams& p, int64_t rows, int64_t heads,
                                int64_t block_k) {
    DecodeNibbles s{};
    const CacheParams& cache = p.varlen.cache;
    if (cache.dtype != CacheDType::kInt4) return s;
    s.of_key = of_groups(cache.k_groups);
    s.of_value = of_groups(cache.v_groups);
    s.block_k = round_up_to_lanes<float>(block_k);
    s.ldq = ceil_div(p.sizes.head_dim, kStep) * kStep;
    s.ld_sums = ceil_div(p.sizes.head_dim_v, kStep) * kStep;
    s.q = arena.take<int16_t>(heads * rows * s.ldq);
    s.q_units = arena.take<float>(heads * rows);
    s.q_sums = arena.take<float>(heads * rows * s.of_key.whole);
    s.widened = arena.take<float>(2 * s.ldq);
    s.keys = take_groups(arena, cache.k_groups, heads * s.numbers_of(s.of_key));
    s.values = take_groups(arena, cache.v_groups, s.numbers_of(s.of_value));
    s.transposed = arena.take<float>(2 * s.of_value.count * s.block_k);
    s.scaled = arena.take<float>(s.block_k);
    s.probs = arena.take<int16_t>(heads * rows * s.of_value.count * s.block_k);
    s.prob_units = arena.take<float>(heads * rows * s.of_value.count);
    s.offsets = arena.take<float>(heads * rows * s.of_value.count);
    s.sums = arena.take<int32_t>(heads * rows * s.ld_sums);
    s.copy = arena.take<int8_t>(kChunkRows * std::max(p.sizes.head_dim, p.sizes.head_dim_v) / 2);
    return s;
  }
  static TileGroups take_groups(Arena& arena, const CacheGroups& groups, int64_t count) {
    return {arena.take<float>(count), groups.zeros ? arena.take<float>(count) : nullptr};
  }

  // Returns the number of scales of a tile. Zeros follow the last row, so that no head reads the numbers of another head.
  int64_t numbers_of(const GroupsOfRow& groups) const { return block_k * groups.count + kLanes<float>; }
  // Returns scales and zero points for the keys of the task's head `n`.
  TileGroups keys_of(int64_t n) const { return keys.from(n, numbers_of(of_key)); }

  template <class In>
  void load_query(const AttentionParams& p, int64_t row, const In* src) const {
    const int64_t cols = p.sizes.head_dim;
    for (int64_t c = 0; c < ldq; c += kLanes<float>)
      store<float>(widened + c, c < cols ? load_columns<float>(src + c, cols - c) : F32{});
    auto* rounded = reinterpret_cast<int16_t*>(widened + ldq);
    q_units[row] = round_row(widened, ldq, kLargestInt16, rounded);
    int16_t* to = q + row * ldq;
    for (int64_t c = 0; c < ldq; ++c)
      to[c / kStep * kStep + c % 2 * (kStep / 2) + c % kStep / 2] = rounded[c];
    float* sums_of_q = q_sums + row * of_key.whole;
    std::fill(sums_of_q, sums_of_q + of_key.whole, 0.0f);
    const float factor = keys.products ? 1.0f : kInt4Zero;
    for (int64_t c = 0; c < cols; ++c) sums_of_q[c / of_key.columns] += factor * rounded[c];
  }

  template <int R>
  FA_NOINLINE void scores(int64_t row, const Rows<uint8_t>& k, const TileGroups& groups, int64_t count,
                          float scale, float* out, int64_t ld, int64_t room, Prefetcher& ahead) const {
    for (int64_t j = 0; j < count; j += kDotSums / R)
      nibble_scores<R>(q + row * ldq, ldq, q_sums + row * of_key.whole, k, groups, of_key, j, count, scale,
                       out, ld, room, ahead);
  }

  // Loads scales and zero points for the values of one head, as rows of groups. Returns whether all are finite.
  FA_NOINLINE bool load_values(const AttentionParams& p, int64_t h_kv, int64_t j0, int64_t count) const {
    const bool is_finite = values.load_tile(p, p.varlen.cache.v_groups, h_kv, j0, count);
    values.transpose_rows(of_value.count, count, round_up_to_lanes<float>(count), transposed, block_k);
    return is_finite;
  }

  // Rounds P s of some rows and all groups. Padding lanes of P are 0.
  FA_NOINLINE void finish_probs(int64_t row, int64_t rows, const float* p, int64_t ld) const {
    const int64_t groups = of_value.count;
    for (int64_t r = row; r < row + rows; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        const float *scales = transposed + g * block_k, *products = scales + of_value.count * block_k;
        F32 offset = {};
        for (int64_t j = 0; j < ld; j += kLanes<float>) {
          const F32 prob = load<float>(p + r * ld + j), product = prob * load<float>(scales + j);
          store<float>(scaled + j, product);
          offset += values.products ? prob * load<float>(products + j) : product * kInt4Zero;
        }
        prob_units[r * groups + g] = round_row(scaled, ld, kLargestInt16, probs + (r * groups + g) * block_k);
        offsets[r * groups + g] = sum_lanes<float>(offset);
      }
  }

  void clear_sums(int64_t row, int64_t rows) const {
    std::fill(sums + row * ld_sums, sums + (row + rows) * ld_sums, 0);
  }

  // Adds the products of at most kChunkRows values to the sums. The first value is key j of the tile.
  template <int R>
  FA_NOINLINE void add_values(int64_t row, int64_t j, const Rows<uint8_t>& v, int64_t count,
                              Prefetcher& ahead) const {
    constexpr int kRows = std::min(R, kDotSums / 4);
    Prefetcher nothing;
    for (int r = 0; r < R; r += kRows) {
      GroupOfStep group{of_value.columns};
      for (int64_t c = 0; c < v.cols; c += kStep) {
        group.advance_to(c);
        nibble_values<kRows>(probs + (row + r) * of_value.count * block_k + j, block_k, v, of_value.count,
                             group, c, count, sums + (row + r) * ld_sums, ld_sums, r == 0 ? ahead : nothing);
      }
    }
  }

  // out += the sums of one row, in the order of its columns.
  FA_NOINLINE void add_sums(int64_t row, float* out, int64_t cols) const {
    constexpr int L = kLanes<float>;
    VecIndex<float> low, high;  // alternately even and odd columns, in each 16 bytes
#pragma GCC unroll 16
    for (int i = 0; i < L; ++i) {
      low[i] = i / 4 * 4 + i % 4 / 2 + i % 2 * L;
      high[i] = low[i] + 2;
    }
    const float *units = prob_units + row * of_value.count, *offset = offsets + row * of_value.count;
    GroupOfStep group{of_value.columns};
    for (int64_t c = 0; c < cols; c += kStep) {
      group.advance_to(c);
      const F32 unit = group.lanes<F32>([&](int64_t g) FA_INLINE_LAMBDA { return units[g]; });
      const F32 shift = group.lanes<F32>([&](int64_t g) FA_INLINE_LAMBDA { return offset[g]; });
      F32 sum[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n)
        sum[n] =
            __builtin_convertvector(
                (S32)load<float>(reinterpret_cast<const float*>(sums + row * ld_sums + c + n * L)), F32) *
                unit -
            shift;
      const F32 parts[4] = {pick<float>(sum[0], sum[1], low), pick<float>(sum[0], sum[1], high),
                            pick<float>(sum[2], sum[3], low), pick<float>(sum[2], sum[3], high)};
      float natural[kStep];
#pragma GCC unroll 16
      for (int n = 0; n < kStep / 4; ++n)
        std::memcpy(natural + n / 4 * 16 + n % 4 * 4,
                    reinterpret_cast<const float*>(&parts[n % 4]) + n / 4 * 4, 16);
      for (int64_t n = 0; n < kStep && c + n < cols; n += L)
        store<float>(out + c + n, load<float>(out + c + n) + load<float>(natural + n));
    }
  }
};

#else

struct DecodeNibbles {
  template <class In>
  static constexpr bool kExists = false;
  static DecodeNibbles allocate(Arena&, const AttentionParams&, int64_t, int64_t, int64_t) { return {}; }
};

#endif
