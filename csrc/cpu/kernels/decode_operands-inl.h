// The operands of decode's products of many rows of Q (decode_many_rows-inl.h), as elements of the accumulator's type or pairs of
// bfloat16.
#pragma once

#include "decode_lane_values-inl.h"
#include "tile_gemm-inl.h"

// P for all rows of a head: [rows][ld], or transposed, as LaneTile.
template <class T>
struct AllProbs {
  const T* data;
  int64_t ld;
  bool transposed;
  const T* rescale;  // [rows]   multiplies O before P V is added; null: 1
  // Only with blocks of lanes: the first key to multiply, and the keys of the LaneTile.
  int64_t first_key = 0, tile_keys = 0;
  bool has_pairs = false;  // each block has pairs of keys in place of P
  T* sums = nullptr;       // [lanes / L][ldo][L]   the tile's O^T of several vectors of rows
};

// A left operand and its strides, as in GemmArgs.
template <class E>
struct LeftOperand {
  const E* data;
  int64_t row, depth;
};

// The operands of both products, as elements of the accumulator's type.
template <class In, class T>
struct ManyRowsOperands {
  using Element = T;
  static constexpr bool kReadsValuesInPlace = std::is_same_v<In, T>;
  static constexpr bool kWidensKeys = !std::is_same_v<In, T>, kPairsProbs = false;

  static int64_t depth_of(int64_t n) { return n; }
  static int64_t prob_elements(int64_t, int64_t) { return 0; }
  // Converts a row of Q to elements, in whole vectors with zeros after the last column.
  static void load_row(const In* from, int64_t cols, T* to) {
    for (int64_t c = 0; c < cols; c += kLanes<T>) store<T>(to + c, load_columns<T>(from + c, cols - c));
  }
  static void load_queries(const T* q, int64_t ldq, int64_t rows, int64_t depth, T* to, int64_t ld) {
    load_tile_transposed<T, T>(q, ldq, rows, depth, to, ld);
  }
  static Tile<T> load_keys(const Rows<In>& k, int64_t keys, T* to, int64_t) {
    if constexpr (std::is_same_v<In, T>) return load_tile<In, T>(k.data, k.stride, keys, k.cols, to);
    // As load_tile(), with four vectors in a step: a step of one vector has more instructions for the loop than for the
    // vector.
    constexpr int L = kLanes<T>;
    const int64_t ld = round_up_to_lanes<T>(k.cols);
    for (int64_t n = 0; n < keys; ++n) {
      const In* from = k.row(n);
      T* row = to + n * ld;
      int64_t c = 0;
      for (; c + 4 * L <= k.cols; c += 4 * L) {
#pragma GCC unroll 4
        for (int v = 0; v < 4; ++v) store<T>(row + c + v * L, load_as<In, T>(from + c + v * L));
      }
      for (; c < k.cols; c += L) store<T>(row + c, load_columns<T>(from + c, k.cols - c));
    }
    return {to, ld};
  }
  // O += P V for `rows` rows: of one block of lanes, and of the block that joins it. `probs`: P^T, [whole chunks of keys][lanes].
  static void add_lanes(const LaneProbs<T>& probs, int64_t rows, const Rows<In>* v, int64_t keys, T* out,
                        int64_t ldo, T*, Prefetcher& ahead) {
    add_values_of_lanes<WideValues<In, T>>(probs, rows, v, keys, out, ldo, ahead);
  }
  static int64_t columns_at_once(int64_t rows) { return columns_of_pass<WideValues<In, T>, T>(rows); }
  // Packs `keys` rows of one panel. The first row is key j of the tile.
  static void load_values(const Rows<In>& v, int64_t j, int64_t keys, T* panel, int64_t width) {
    for (int64_t n = 0; n < keys; ++n)
      for (int64_t c = 0; c < width; c += kLanes<T>)
        store<T>(panel + (j + n) * width + c, load_columns<T>(v.row(n) + c, v.cols - c));
  }
  static LeftOperand<T> load_probs(const AllProbs<T>& p, int64_t, int64_t, T*) {
    return {p.data, p.transposed ? 1 : p.ld, p.transposed ? p.ld : 1};
  }
};

#if defined(FA_DOT_BFLOAT16)

// The operands as pairs of bfloat16 values along the depth.
template <>
struct ManyRowsOperands<BFloat16, float> {
  using Element = Pair;
  using RoundedProbs = LanePairs;
  static constexpr bool kReadsValuesInPlace = false, kWidensKeys = false, kPairsProbs = true;

  static int64_t depth_of(int64_t n) { return pairs_of(n); }
  static int64_t prob_elements(int64_t lanes, int64_t keys) {
    return std::max(LeftPairs::count(lanes, keys), lanes * keys / 2 + kLanes<float>);
  }
  static void load_row(const BFloat16* from, int64_t cols, Pair* to) {
    for (int64_t c = 0; c < cols; c += 2 * kLanes<float>)
      store_elements(to + c / 2, load_pairs(from + c, cols - c));
  }
  static void load_queries(const Pair* q, int64_t ldq, int64_t rows, int64_t depth, Pair* to, int64_t ld) {
    load_pairs_transposed(reinterpret_cast<const BFloat16*>(q), 2 * ldq, rows, 2 * depth, to, ld);
  }
  static Tile<Pair> load_keys(const Rows<BFloat16>& k, int64_t keys, Pair* to, int64_t multiple) {
    return load_pair_rows(k.data, k.stride, keys, k.cols, to, multiple);
  }
  static void add_lanes(const LaneProbs<float>& probs, int64_t rows, const Rows<BFloat16>* v, int64_t keys,
                        float* out, int64_t ldo, Pair* pairs, Prefetcher& ahead) {
    constexpr int L = kLanes<float>;
    const int64_t vectors = whole_chunks(keys) * probs.lanes / L;
    const LanePairs write(pairs, probs.lanes);
    for (int64_t n = 0; n < vectors; n += 2)
      write(n, load<float>(probs.data + n * L), load<float>(probs.data + (n + 1) * L));
    add_pairs(pairs, rows, v, keys, out, ldo, ahead);
  }
  // As add_lanes(). `probs`: pairs of P^T, [whole chunks of keys / 2][lanes].
  static void add_pairs(const Pair* probs, int64_t rows, const Rows<BFloat16>* v, int64_t keys, float* out,
                        int64_t ldo, Prefetcher& ahead) {
    add_values_of_lanes<PairValues<BFloat16, F32>>({probs, lanes_of<float>(rows)}, rows, v, keys, out, ldo,
                                                   ahead);
  }
  static int64_t columns_at_once(int64_t rows) {
    return columns_of_pass<PairValues<BFloat16, F32>, float>(rows);
  }
  static void load_values(const Rows<BFloat16>& v, int64_t j, int64_t keys, Pair* panel, int64_t width) {
    load_pairs_across(v.data, v.stride, keys, std::min(v.cols, width), panel + j / 2 * width, width);
  }
  static LeftOperand<Pair> load_probs(const AllProbs<float>& p, int64_t rows, int64_t keys, Pair* to) {
    if (p.transposed) {
      const LeftPairs left = transposed_pairs(p.data, keys, p.ld, to);
      return {left.data, left.row, left.depth};
    }
    for (int64_t n = 0; n < rows * p.ld; n += kLanes<float>)
      store_as<BFloat16, float>(reinterpret_cast<BFloat16*>(to) + n, load<float>(p.data + n));
    return {to, p.ld / 2, 1};
  }
};

#endif
