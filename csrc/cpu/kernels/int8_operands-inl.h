// Rounds the operands of int8 attention (int8_forward-inl.h) to integers.
//
//   q     one factor for each row: f = max |q| / 127                     codes = round(q / f)
//   k     the mean of a head's keys is subtracted, then as q             codes = round((k - mean) / f)
//   v     one factor for each column of a tile of keys: max |v| / 4095   codes = round(v / f)
//
// A row of q or k with Inf or NaN gets the factor NaN, so all of its scores are NaN. A row of v with Inf or NaN gets
// codes of 0, and the forward adds the row itself.
//
// Padding may have any numbers. So keys that a mask hides from all queries do not count in means and in factors of v.
#pragma once

#include "bias-inl.h"
#include "int8_tiles-inl.h"
#include "masked_gemm-inl.h"

// A vector of codes.
#if defined(FA_DOT_INT8_WORDS)
typedef int8_t Code __attribute__((vector_size(FA_VECTOR_BYTES / 4)));
#else
typedef int16_t Code __attribute__((vector_size(FA_VECTOR_BYTES / 2)));
#endif

constexpr float kLargestInt8 = 127, kLargestValueCode = 4095;
constexpr float kToInteger = 0x1.8p23f;  // adding it rounds to an integer in the low bits
constexpr int64_t kInt8BlockK = 64;      // keys of a tile

static_assert(forward_tiling<float>().block_k == kInt8BlockK);

FA_INLINE Vec<float> magnitude(Vec<float> x) { return (Vec<float>)((VecBits<float>)x & 0x7fffffffu); }

// The factor of codes up to `most`, and its inverse. The inverse of subnormals would be Inf.
struct CodeFactor {
  float factor, inverse;

  static CodeFactor of(float largest, float most) {
    if (largest == 0) return {0, 0};
    const float inverse = std::min(most / largest, std::numeric_limits<float>::max());
    return {1 / inverse, inverse};
  }
};

FA_INLINE Sums32 rounded(Vec<float> x) { return (Sums32)(x + kToInteger) - (Sums32)splat<float>(kToInteger); }

// Writes the codes of a row, in whole words, padded with zeros. `mean` (or null) is subtracted. Bytes are written plus
// `offset`. Returns the factor, and the sum of the codes in `sum`.
template <class In>
inline float code_row(const In* row, int64_t cols, const float* mean, int32_t offset, uint32_t* to,
                      int32_t& sum) {
  constexpr int L = kLanes<float>;
  const auto column = [&](int64_t c) FA_INLINE_LAMBDA {
    const Vec<float> x = load_columns<float>(row + c, cols - c);
    return mean ? x - load<float>(mean + c) : x;
  };
  Vec<float> highest = {}, probe = {};
  for (int64_t c = 0; c < cols; c += L) {
    const Vec<float> x = column(c);
    highest = max<float>(highest, magnitude(x));
    probe += x * 0.0f;
  }
  const bool finite = sum_lanes<float>(probe) == 0;
  const CodeFactor f = finite ? CodeFactor::of(max_lanes<float>(highest), kLargestInt8) : CodeFactor{0, 0};
  Sums32 sums = {};
  for (int64_t c = 0; c < cols; c += L) {
    const Sums32 codes = finite ? rounded(column(c) * f.inverse) : Sums32{};
    sums += codes;
    const Code narrow = __builtin_convertvector(codes + (kMultipliesBytes ? offset : 0), Code);
    std::memcpy(reinterpret_cast<char*>(to) + c * sizeof(Code) / L, &narrow, sizeof narrow);
  }
  sum = 0;
  for (int i = 0; i < L; ++i) sum += sums[i];
  return finite ? f.factor : std::numeric_limits<float>::quiet_NaN();
}

// Whether a mask with one element for each key hides key j.
inline bool hides_key(const MaskParams& keys, int64_t b, int64_t j) {
  const int64_t n = b * keys.stride_b + j * keys.stride_k;
  if (keys.dtype == DType::kBool) return !static_cast<const bool*>(keys.data)[n];
  return for_float_mask<float>(keys.dtype, [&](auto element) {
    return scalar_as<float>(static_cast<const decltype(element)*>(keys.data)[n]) == kNegInf<float>;
  });
}

// Whether the masks hide key j of a batch from all heads and queries.
inline bool is_hidden_from_all(const MaskParams& mask, int64_t b, int64_t j) {
  if (mask && mask.stride_h == 0 && mask.stride_q == 0 && hides_key(mask, b, j)) return true;
  return mask.key_data && hides_key(mask.of_keys(), b, j);
}

// The keys and values of all heads as integers. Written once for each call.
struct Int8Keys {
  int64_t words;          // of a row of codes of q and k: the depth of a product
  int64_t stride;         // words from a row of k to the next row
  int64_t columns, ld_v;  // D and D_v in whole vectors
  int64_t rows, count;    // padded keys of a head; its tiles
  float* means;           // [heads][columns]
  uint32_t* k;            // [heads][rows][stride]
  float* k_factors;       // [heads][rows]
  uint32_t* v;            // [heads][count][block_k / 2][ld_v]
  float* v_factors;       // [heads][count][ld_v]
  uint8_t* not_finite;    // [heads][count]   a value of the tile is Inf or NaN
  uint64_t* hidden;       // [heads][count]   bits: the tile's keys that a mask hides from all queries

  static Int8Keys allocate(Arena& arena, const AttentionParams& p) {
    const Sizes& z = p.sizes;
    const int64_t heads = z.batch * z.heads_kv;
    Int8Keys r;
    constexpr int64_t per_word = kMultipliesBytes ? 4 : 2;
    r.columns = round_up_to_lanes<float>(z.head_dim);
    r.ld_v = round_up_to_lanes<float>(z.head_dim_v);
    r.words = ceil_div(z.head_dim, per_word);
    r.stride = r.columns / per_word;
    r.count = ceil_div(z.seqlen_k, kInt8BlockK);
    r.rows = r.count * kInt8BlockK;
    r.means = arena.take<float>(heads * r.columns);
    r.k = arena.take<uint32_t>(heads * r.rows * r.stride);
    r.k_factors = arena.take<float>(heads * r.rows);
    r.v = arena.take<uint32_t>(heads * r.rows / 2 * r.ld_v);
    r.v_factors = arena.take<float>(heads * r.count * r.ld_v);
    r.not_finite = arena.take<uint8_t>(heads * r.count);
    r.hidden = arena.take<uint64_t>(heads * r.count);
    return r;
  }

  // The mean of the finite elements of each column, without hidden keys. `head`: b * H_kv + h_kv.
  template <class In>
  void average(const AttentionParams& p, int64_t head) const {
    constexpr int L = kLanes<float>;
    const Sizes& z = p.sizes;
    const int64_t b = head / z.heads_kv, h = head % z.heads_kv;
    float* mean = means + head * columns;
    std::fill(mean, mean + columns, 0.0f);
    uint64_t* bits = hidden + head * count;
    std::fill(bits, bits + count, uint64_t{0});
    for (int64_t j = 0; p.mask && j < z.seqlen_k; ++j)
      bits[j / kInt8BlockK] |= uint64_t{is_hidden_from_all(p.mask, b, j)} << (j % kInt8BlockK);
    for (int64_t c = 0; c < z.head_dim; c += L) {
      Vec<float> sum = {}, finite = {};
      for (int64_t j = 0; j < z.seqlen_k; ++j) {
        if (p.mask && bits[j / kInt8BlockK] >> (j % kInt8BlockK) & 1) continue;
        const Vec<float> x = load_columns<float>(p.k.row<In>(b, h, j) + c, z.head_dim - c);
        const auto is_finite = x * 0.0f == 0.0f;
        sum += is_finite ? x : Vec<float>{};
        finite += is_finite ? Vec<float>{} + 1.0f : Vec<float>{};
      }
      const Vec<float> x = sum * (1.0f / finite);
      store<float>(mean + c,
                   x * 0.0f == 0.0f ? x : Vec<float>{});  // the sum may overflow; or no element is finite
    }
  }

  // Rounds the keys and values of one tile.
  template <class In>
  void round_tile(const AttentionParams& p, int64_t head, int64_t tile) const {
    const Sizes& z = p.sizes;
    const int64_t b = head / z.heads_kv, h = head % z.heads_kv, j0 = tile * kInt8BlockK;
    const int64_t keys = std::min(kInt8BlockK, z.seqlen_k - j0);
    const float* mean = means + head * columns;
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t row = head * rows + j0 + j;
      int32_t sum;
      k_factors[row] = code_row<In>(p.k.row<In>(b, h, j0 + j), z.head_dim, mean, 128, k + row * stride, sum);
    }
    round_values<In>(p.v.row<In>(b, h, j0), p.v.stride_s, keys, z.head_dim_v, head * count + tile);
  }

 private:
  template <class In>
  void round_values(const In* data, int64_t stride_v, int64_t keys, int64_t cols, int64_t tile) const {
    constexpr int L = kLanes<float>;
    const Rows<In> values{data, stride_v, cols};
    bool counts[kInt8BlockK] = {};
    const bool all_finite = rows_are_finite<In, float>(values, keys);
    for (int64_t j = 0; j < keys; ++j)
      counts[j] = !(hidden[tile] >> j & 1) &&
                  (all_finite || rows_are_finite<In, float>({values.row(j), stride_v, cols}, 1));
    not_finite[tile] = !all_finite;
    uint32_t* pairs = v + tile * (kInt8BlockK / 2) * ld_v;
    for (int64_t c = 0; c < ld_v; c += L) {
      const auto value = [&](int64_t j) FA_INLINE_LAMBDA {
        return j < keys && counts[j] ? load_columns<float>(values.row(j) + c, cols - c) : Vec<float>{};
      };
      Vec<float> highest = {};
      for (int64_t j = 0; j < keys; ++j) highest = max<float>(highest, magnitude(value(j)));
      Vec<float> inverse = splat<float>(kLargestValueCode) / highest;
      const Vec<float> most = splat<float>(std::numeric_limits<float>::max());
      inverse = highest == 0.0f ? Vec<float>{} : inverse > most ? most : inverse;
      store<float>(v_factors + tile * ld_v + c, highest == 0.0f ? Vec<float>{} : 1.0f / inverse);
      for (int64_t j = 0; j < kInt8BlockK; j += 2) {
        const Words32 low = (Words32)rounded(value(j) * inverse),
                      high = (Words32)rounded(value(j + 1) * inverse);
        const Words32 pair = (low & 0xffffu) | (high << 16);
        store<float>(reinterpret_cast<float*>(pairs + j / 2 * ld_v + c), (Vec<float>)pair);
      }
    }
  }
};

// The queries of one block as integers.
struct Int8Queries {
  uint32_t* rows;             // [block_q][stride]
  uint32_t* words;            // [words][block_q]   transposed
  int32_t* starts;            // [block_q]
  float *factors, *products;  // [block_q]   products: scale * <q, mean of the keys>

  static Int8Queries allocate(Arena& arena, const Int8Keys& keys, int64_t block_q) {
    Int8Queries r;
    r.rows = arena.take<uint32_t>(block_q * keys.stride);
    r.words = arena.take<uint32_t>(keys.stride * block_q);
    r.starts = arena.take<int32_t>(block_q);
    r.factors = arena.take<float>(block_q);
    r.products = arena.take<float>(block_q);
    return r;
  }

  // Lanes past `queries` get the factor 0.
  template <class In>
  void load_rows(const AttentionParams& p, const Int8Keys& keys, int64_t b, int64_t h, int64_t i0,
                 int64_t queries, int64_t ld, float scale) const {
    constexpr int L = kLanes<float>;
    const int64_t d = p.sizes.head_dim;
    const float* mean = keys.means + (b * p.sizes.heads_kv + p.sizes.kv_head(h)) * keys.columns;
    for (int64_t i = 0; i < queries; ++i) {
      const In* row = p.q.row<In>(b, h, i0 + i);
      int32_t sum;
      factors[i] = scale * code_row<In>(row, d, nullptr, 0, rows + i * keys.stride, sum);
      starts[i] = kMultipliesBytes ? -128 * sum : 0;
      Vec<float> product = {};
      for (int64_t c = 0; c < d; c += L)
        product += load_columns<float>(row + c, d - c) * load<float>(mean + c);
      products[i] = scale * sum_lanes<float>(product);
    }
    std::fill(starts + queries, starts + ld, 0);
    std::fill(factors + queries, factors + ld, 0.0f);
    std::fill(products + queries, products + ld, 0.0f);
    load_tile_transposed<float, float>(reinterpret_cast<const float*>(rows), keys.stride, queries, keys.words,
                                       reinterpret_cast<float*>(words), ld);
  }
};
