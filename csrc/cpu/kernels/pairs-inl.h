// Tiles of bfloat16 pairs, for the products of vec/pair-inl.h.
#pragma once

#include "../vec/pair-inl.h"
#include "tiles-inl.h"

#if defined(FA_DOT_BFLOAT16)

// AMX's tile unit goes to sleep half a microsecond after its last product. Then the products of the next microsecond
// take 1.5 times as long (Granite Rapids). So longer code without products calls this function every few hundred
// cycles.
FA_INLINE void keep_product_unit_awake() {
#if defined(FA_HAS_TILE_REGISTERS)
  FA_TILE_KEEP_AWAKE();
#endif
}

// Loads `n` <= 2 * lanes values of a row as pairs along it, padded with zeros.
FA_INLINE U32 load_pairs(const BFloat16* p, int64_t n) {
  constexpr int64_t kMost = 2 * kLanes<float>;
  if (n >= kMost) return load_elements(reinterpret_cast<const Pair*>(p));
  BFloat16 buffer[kMost] = {};
  std::memcpy(buffer, p, n * sizeof(BFloat16));
  return load_elements(reinterpret_cast<const Pair*>(buffer));
}

// Returns rows as pairs along them: the caller's memory, or a copy padded with zeros if rows are not a multiple of
// `multiple` pairs.
inline Tile<Pair> load_pair_rows(const BFloat16* src, int64_t stride, int64_t rows, int64_t cols,
                                 Pair* scratch, int64_t multiple = 1) {
  if (cols % (2 * multiple) == 0 && stride % 2 == 0) return {reinterpret_cast<const Pair*>(src), stride / 2};
  constexpr int64_t L = kLanes<float>;
  const int64_t ld = round_up_to_lanes<float>(pairs_of(cols));
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; c += 2 * L)
      store_elements(scratch + r * ld + c / 2, load_pairs(src + r * stride + c, cols - c));
  return {scratch, ld};
}

// dst[c / 2][r] = (src[r][c], src[r][c + 1]): pairs along the rows, transposed. Padded with zeros.
inline void load_pairs_transposed(const BFloat16* src, int64_t stride, int64_t rows, int64_t cols, Pair* dst,
                                  int64_t ld) {
  constexpr int L = kLanes<float>;
  const int64_t words = pairs_of(cols);
  for (int64_t r0 = 0; r0 < rows; r0 += L)
    for (int64_t w0 = 0; w0 < words; w0 += L) {
      F32 block[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r)
        block[r] = r0 + r < rows ? (F32)load_pairs(src + (r0 + r) * stride + 2 * w0, cols - 2 * w0) : F32{};
      transpose<float>(block);
#pragma GCC unroll 16
      for (int w = 0; w < L; ++w)
        if (w0 + w < words) store_elements(dst + (w0 + w) * ld + r0, (U32)block[w]);
    }
}

// dst[r / 2][c] = (src[r][c], src[r + 1][c]): pairs across the rows. Padded with zeros.
inline void load_pairs_across(const BFloat16* src, int64_t stride, int64_t rows, int64_t cols, Pair* dst,
                              int64_t ld) {
  constexpr int L = kLanes<float>;
  const int64_t full_cols = cols / (2 * L) * (2 * L);
  for (int64_t r = 0; r + 1 < rows; r += 2) {
    if (r % 16 == 0) keep_product_unit_awake();
    const BFloat16 *low = src + r * stride, *high = low + stride;
    Pair* to = dst + r / 2 * ld;
    for (int64_t c = 0; c < full_cols; c += 2 * L) {
      U32 first, second;
      interleave(load_pairs(low + c, 2 * L), load_pairs(high + c, 2 * L), first, second);
      store_elements(to + c, first);
      store_elements(to + c + L, second);
    }
  }
  if (full_cols == cols && rows % 2 == 0) return;
  const auto row_bits = [&](int64_t r, int64_t c) {
    if (r >= rows) return U32{};
    return (U32)load_columns<float>(src + r * stride + c, cols - c);
  };
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t c = r + 1 < rows ? full_cols : 0; c < cols; c += L)
      // A widened value is in the upper half of its lane.
      store_elements(dst + r / 2 * ld + c, (row_bits(r, c) >> 16) | row_bits(r + 1, c));
}

// Replaces rows that are not finite by zeros in the result of load_pairs_across(). Returns whether there were any.
inline bool clear_rows_not_finite(const Rows<BFloat16>& src, int64_t rows, Pair* pairs, int64_t ld) {
  if (rows_are_finite<BFloat16, float>(src, rows)) return false;
  for (int64_t r = 0; r < rows; ++r) {
    if (rows_are_finite<BFloat16, float>({src.row(r), src.stride, src.cols}, 1)) continue;
    for (int64_t c = 0; c < ld; ++c) (r % 2 ? pairs[r / 2 * ld + c].high : pairs[r / 2 * ld + c].low) = 0;
  }
  return true;
}

// A left operand: pairs along the depth, with the strides GemmArgs::a_row and a_depth.
struct LeftPairs {
  const Pair* data;
  int64_t row, depth;

  // The number of pairs for `rows` rows and depth `depth`.
  static int64_t count(int64_t rows, int64_t depth) {
    return rows * round_up_to_lanes<float>(pairs_of(depth));
  }
};

// P^T, [rows][lanes], as the left operand of P V: pairs of its rows, [lanes][rows / 2] for AMX.
inline LeftPairs probs_operand(Pair* data, int64_t rows, int64_t lanes) {
#if defined(FA_HAS_TILE_REGISTERS)
  return {data, round_up_to_lanes<float>(pairs_of(rows)), 1};
#else
  (void)rows;
  return {data, 1, lanes};
#endif
}

// dst[r][lane] = row r of probs_operand().
inline void widen_probs(const LeftPairs& src, int64_t rows, int64_t lanes, float* dst) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < lanes; ++c) {
      const Pair both = src.data[c * src.row + r / 2 * src.depth];
      const uint32_t bits = uint32_t{r % 2 ? both.high : both.low} << 16;
      std::memcpy(dst + r * lanes + c, &bits, sizeof(bits));
    }
}

// Rounds and transposes `rows` x `ld` lanes of src: each lane becomes a row of the operand.
inline LeftPairs transposed_pairs(const float* src, int64_t rows, int64_t ld, Pair* dst) {
  constexpr int L = kLanes<float>;
  const auto pairs_at = [&](int64_t r, int64_t c) FA_INLINE_LAMBDA {
    const F32 high = r + 1 < rows ? load<float>(src + (r + 1) * ld + c) : F32{};
    return pair_up(load<float>(src + r * ld + c), high);
  };
#if defined(FA_HAS_TILE_REGISTERS)  // AMX needs rows along the depth
  const int64_t to_ld = round_up_to_lanes<float>(pairs_of(rows));
  for (int64_t r0 = 0; r0 < rows; r0 += 2 * L)
    for (int64_t c = 0; c < ld; c += L) {
      F32 block[L];
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) block[r] = r0 + 2 * r < rows ? (F32)pairs_at(r0 + 2 * r, c) : F32{};
      transpose<float>(block);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r) store_elements(dst + (c + r) * to_ld + r0 / 2, (U32)block[r]);
    }
  return {dst, to_ld, 1};
#else
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t c = 0; c < ld; c += L) store_elements(dst + r / 2 * ld + c, pairs_at(r, c));
  return {dst, 1, ld};
#endif
}

#endif
