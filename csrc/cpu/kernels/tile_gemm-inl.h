// The product of gemm-inl.h for pairs, on the tile registers of AMX. One instruction adds a product of 16 x 16 pairs
// of A and 16 x 16 pairs of B to 16 x 16 sums.
//
// Rows of A are contiguous along the depth: a_depth = 1. As in gemm(), sums start from 0 and are added to C at the
// end.
#pragma once

#include "gemm-inl.h"
#include "pairs-inl.h"

#if defined(FA_HAS_TILE_REGISTERS)

static_assert(kLanes<float> == 16);
constexpr int64_t kSide = 16;  // of a tile: its rows, the pairs in a row of A, the columns of B and C

// The memory operand of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};  // per register, for eight registers
  uint8_t rows[16] = {kSide, kSide, kSide, kSide, kSide, kSide, kSide, kSide};
};
static_assert(sizeof(TileConfig) == 64);
constexpr TileConfig kWholeTiles;

// A task configures the registers at its start and releases them at its end, so that other code can use them.
template <>
struct ProductUnit<BFloat16> {
  ProductUnit() { FA_TILE_CONFIGURE(kWholeTiles); }
  ~ProductUnit() { FA_TILE_RELEASE(); }
  ProductUnit(const ProductUnit&) = delete;
  ProductUnit& operator=(const ProductUnit&) = delete;
};

// Calls body(std::integral_constant) for 0 to kCount - 1, because a register number is part of the instruction.
template <class Body, int... n>
FA_INLINE void for_each_constant(std::integer_sequence<int, n...>, const Body& body) {
  (body(std::integral_constant<int, n>{}), ...);
}
template <int kCount, class Body>
FA_INLINE void for_each_constant(const Body& body) {
  for_each_constant(std::make_integer_sequence<int, kCount>{}, body);
}

// Loads rows x pairs of an operand into a register, padded with zeros.
template <int kRegister>
FA_INLINE void load_operand(const Pair* from, int64_t ld, int64_t rows, int64_t pairs) {
  if (rows >= kSide && pairs >= kSide) {
    FA_TILE_LOAD(kRegister, from, ld * sizeof(Pair));
    return;
  }
  alignas(64) Pair padded[kSide * kSide];
  for (int64_t r = 0; r < kSide; ++r)
    store_elements(
        padded + r * kSide,
        r < rows ? load_pairs(reinterpret_cast<const BFloat16*>(from + r * ld), 2 * pairs) : U32{});
  FA_TILE_LOAD(kRegister, padded, kSide * sizeof(Pair));
}

// Whether the registers load the tile of C: all of its rows are memory of C, and the product has no scale.
FA_INLINE bool holds_sums(const GemmArgs<float, Pair>& g, int64_t rows, int64_t m) {
  return g.scale == 1 && rows - m >= kSide;
}

// Sets a register to the tile of C at row m and column n, or to 0 if store_sums() adds C.
template <int kRegister>
FA_INLINE void load_sums(const GemmArgs<float, Pair>& g, int64_t rows, int64_t m, int64_t n) {
  if (g.accumulate && holds_sums(g, rows, m)) {
    FA_TILE_LOAD(kRegister, g.c + m * g.ldc + n, g.ldc * sizeof(float));
  } else {
    FA_TILE_ZERO(kRegister);
  }
}

// Stores a register to the tile of C at row m and column n.
template <int kRegister>
FA_INLINE void store_sums(const GemmArgs<float, Pair>& g, int64_t rows, int64_t m, int64_t n) {
  float* c = g.c + m * g.ldc + n;
  if (holds_sums(g, rows, m)) {
    FA_TILE_STORE(kRegister, c, g.ldc * sizeof(float));
    return;
  }
  alignas(64) float sums[kSide * kSide];
  FA_TILE_STORE(kRegister, sums, kSide * sizeof(float));
  for (int64_t r = 0; r < std::min(kSide, rows - m); ++r) {
    const F32 sum = load<float>(sums + r * kSide) * g.scale;
    float* to = c + r * g.ldc;
    store<float>(to, g.accumulate ? load<float>(to) + sum : sum);
  }
}

// Computes MR x NR tiles of C in registers 0, 1, ... Four tiles are enough independent chains to hide the latency of
// a product. Four registers remain: two tiles of A and two of B, or one of B and three used in rotation for A.
template <int MR, int NR>
inline void multiply_tiles(const GemmArgs<float, Pair>& g, int64_t rows, int64_t m0, int64_t n0) {
  static_assert(MR * NR <= 4 && (MR == NR || MR == 1 || NR == 1));
  constexpr bool kSquare = MR == NR && MR > 1;
  constexpr int kTurns = kSquare ? 2 : 3, kFirstB = kSquare ? 6 : NR == 1 ? 7 : 5;
  g.prefetch_hook(MR * NR * kSide);
  for_each_constant<MR * NR>([&](auto sum) FA_INLINE_LAMBDA {
    constexpr int kSum = decltype(sum)::value;
    load_sums<kSum>(g, rows, m0 + kSum / NR * kSide, n0 + kSum % NR * kSide);
  });
  for (int64_t k = 0; k < g.depth; k += kSide) {
    const int64_t depth = g.depth - k;
    for_each_constant<MR>([&](auto m) FA_INLINE_LAMBDA {
      for_each_constant<NR>([&](auto n) FA_INLINE_LAMBDA {
        constexpr int kM = decltype(m)::value, kN = decltype(n)::value;
        constexpr int kA = 4 + kM % kTurns, kB = kFirstB + kN % kTurns;
        const int64_t row = m0 + kM * kSide;
        if constexpr (kN == 0) load_operand<kA>(g.a + row * g.a_row + k, g.a_row, rows - row, depth);
        if constexpr (kM == 0) load_operand<kB>(g.b + k * g.ldb + n0 + kN * kSide, g.ldb, depth, kSide);
        FA_TILE_DOT_BFLOAT16(kM * NR + kN, kA, kB);
      });
    });
  }
  for_each_constant<MR * NR>([&](auto sum) FA_INLINE_LAMBDA {
    constexpr int kSum = decltype(sum)::value;
    store_sums<kSum>(g, rows, m0 + kSum / NR * kSide, n0 + kSum % NR * kSide);
  });
}

// Multiplies each row of C by its factor. Most factors are 1: few tiles of keys raise the maximum of a row.
inline void multiply_rows_by_factor(int64_t rows, int64_t cols, const GemmArgs<float, Pair>& g) {
  for (int64_t m = 0; m < rows; ++m) {
    if (g.factor[m] == 1) continue;
    float* row = g.c + m * g.ldc;
    for (int64_t n = 0; n < cols; n += kSide) store<float>(row + n, load<float>(row + n) * g.factor[m]);
  }
}

// Computes squares of 2 x 2 tiles, then a remaining column of tiles, then a remaining row of tiles.
template <>
inline void gemm<float, Pair>(int64_t rows, int64_t cols, const GemmArgs<float, Pair>& g) {
  if (g.accumulate && g.factor) multiply_rows_by_factor(rows, cols, g);
  const int64_t even_rows = ceil_div(rows, kSide) / 2 * (2 * kSide);
  const int64_t even_cols = ceil_div(cols, kSide) / 2 * (2 * kSide);
  for (int64_t n = 0; n < even_cols; n += 2 * kSide)
    for (int64_t m = 0; m < even_rows; m += 2 * kSide) multiply_tiles<2, 2>(g, rows, m, n);
  if (even_cols < cols)
    for (int64_t m = 0; m < rows; m += 4 * kSide) switch (std::min<int64_t>(ceil_div(rows - m, kSide), 4)) {
        case 1: multiply_tiles<1, 1>(g, rows, m, even_cols); break;
        case 2: multiply_tiles<2, 1>(g, rows, m, even_cols); break;
        case 3: multiply_tiles<3, 1>(g, rows, m, even_cols); break;
        default: multiply_tiles<4, 1>(g, rows, m, even_cols);
      }
  if (even_rows < rows)
    for (int64_t n = 0; n < even_cols; n += 4 * kSide) {
      if (even_cols - n > 2 * kSide)
        multiply_tiles<1, 4>(g, rows, even_rows, n);
      else
        multiply_tiles<1, 2>(g, rows, even_rows, n);
    }
}

#endif
