// The matrix product of all kernels: C (+)= A * B. B and C are row-major. A is read one element at a time, broadcast,
// with any strides. So different strides give Q K^T, P V, P^T dO, ...
//
//  C[m][n] (= or += or *= factor[m] and +=) scale * sum_k A[m * a_row + k * a_depth] * B[k * ldb + n]
//  n in whole vectors
//
// Elements of A and B have the type T of C, or are Pairs: two consecutive 16-bit values along the depth. A
// register tile of MR x NV vectors of C stays in registers over the whole depth. It starts from 0 and is added to C
// at the end: it rounds like a sum of tiles, not like one long chain.
#pragma once

#include "../vec/pair-inl.h"  // before the templates that call its functions
#include "tiling-inl.h"

// A function that a product calls before each register tile, with the number of vectors of C in the tile.
struct PrefetchHook {
  void (*call)(void* self, int64_t vectors) = nullptr;
  void* self = nullptr;

  void operator()(int64_t vectors) const {
    if (call) call(self, vectors);
  }
};

// Prefetches `lines` cache lines from `ahead`, evenly spread over a product of `vectors` vectors.
template <class Ahead>
class GradualPrefetch {
 public:
  GradualPrefetch(Ahead& ahead, int64_t lines, int64_t vectors)
      : ahead_(ahead), units_(lines > 0 && vectors > 0 ? ceil_div(lines * kLineUnits, vectors) : 0) {}

  PrefetchHook prefetch_hook() {
    if (units_ == 0) return {};
    return {[](void* self, int64_t vectors) { static_cast<GradualPrefetch*>(self)->advance(vectors); }, this};
  }

 private:
  void advance(int64_t vectors) {
    due_ += vectors * units_;
    ahead_.lines(due_ / kLineUnits);
    due_ %= kLineUnits;
  }

  // Units of a line. A division for each register tile would take longer.
  static constexpr int64_t kLineUnits = 1 << 16;

  Ahead& ahead_;
  const int64_t units_;  // for each vector
  int64_t due_ = 0;      // units
};

template <class T, class E = T>
struct GemmArgs {
  int64_t depth;
  const E* a;
  int64_t a_row, a_depth;
  const E* b;
  int64_t ldb;
  T* c;
  int64_t ldc;
  bool accumulate;
  T scale = 1;                // multiplies the product
  const T* factor = nullptr;  // [rows], multiplies C before the product is added; null: 1
  PrefetchHook prefetch_hook = {};
};

// A task that multiplies elements of In holds a ProductUnit. On AMX it configures the tile registers.
template <class In>
struct ProductUnit {
  ProductUnit() {}
};

// Operations of the product on elements of type T; pairs-inl.h has them for Pair.
template <class T>
FA_INLINE Vec<T> broadcast_element(const T* p) {
  return splat<T>(*p);
}
template <class T>
FA_INLINE Vec<T> load_elements(const T* p) {
  return load<T>(p);
}
template <class T>
FA_INLINE void store_elements(T* p, Vec<T> x) {
  store<T>(p, x);
}
template <class V>
FA_INLINE V multiply_add(V sum, V a, V b) {
  return sum + a * b;
}

// `a_row`: g.a_row, or the constant 1. With the constant, one register addresses all rows of A. Otherwise the compiler needs an
// address for each row, and keeps some of them in vector registers.
template <class T, class E, int MR, int NV, class ARow = int64_t>
FA_INLINE void gemm_register_tile(const GemmArgs<T, E>& g, ARow a_row, int64_t m0, int64_t n0) {
  constexpr int L = kLanes<T>;
  g.prefetch_hook(MR * NV);
  const E* a = g.a + m0 * a_row;
  const E* b = g.b + n0;
  T* c = g.c + m0 * g.ldc + n0;
  Vec<T> acc[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) acc[m][n] = Vec<T>{};
  for (int64_t k = 0; k < g.depth; ++k) {
    decltype(load_elements(b)) bv[NV];
#pragma GCC unroll 4
    for (int n = 0; n < NV; ++n) bv[n] = load_elements(b + n * L);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const auto av = broadcast_element(a + m * a_row);
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) acc[m][n] = multiply_add(acc[m][n], av, bv[n]);
    }
    a += g.a_depth;
    b += g.ldb;
  }
  if (g.scale != T(1))
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) acc[m][n] = acc[m][n] * g.scale;
  // A pointer that walks over the rows: the compiler would keep the addresses of all rows in vector registers.
  const int64_t ldc = g.ldc;
  const auto store_rows = [&](const auto& sum) FA_INLINE_LAMBDA {
    T* to = c;
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m, to += ldc)
#pragma GCC unroll 4
      for (int n = 0; n < NV; ++n) store<T>(to + n * L, sum(m, to + n * L, acc[m][n]));
  };
  if (!g.accumulate) {
    store_rows([](int, const T*, Vec<T> x) FA_INLINE_LAMBDA { return x; });
  } else if (!g.factor) {
    store_rows([](int, const T* from, Vec<T> x) FA_INLINE_LAMBDA { return load<T>(from) + x; });
  } else {
    const T* factor = g.factor + m0;
    store_rows([=](int m, const T* from, Vec<T> x)
                   FA_INLINE_LAMBDA { return load<T>(from) * splat<T>(factor[m]) + x; });
  }
}

// Computes all rows of one column panel of NV vectors: full register tiles, then smaller ones. 16 remaining rows are
// two tiles of 8, not 12 + 4: four rows of two vectors have too few chains to hide the latency of an FMA.
template <class T, class E, int MR, int NV>
inline void gemm_panel(const GemmArgs<T, E>& g, int64_t rows, int64_t n0) {
  int64_t m = 0;
  const auto add_full_tiles = [&](auto a_row) FA_INLINE_LAMBDA {
    for (; m + MR <= rows && !(MR == 12 && rows - m == 16); m += MR)
      gemm_register_tile<T, E, MR, NV>(g, a_row, m, n0);
  };
  if (g.a_row == 1)
    add_full_tiles(std::integral_constant<int64_t, 1>{});
  else
    add_full_tiles(g.a_row);
  if constexpr (MR > 8)
    for (; m + 8 <= rows; m += 8) gemm_register_tile<T, E, 8, NV>(g, g.a_row, m, n0);
  if constexpr (MR > 4)
    for (; m + 4 <= rows; m += 4) gemm_register_tile<T, E, 4, NV>(g, g.a_row, m, n0);
  for (; m < rows; ++m) gemm_register_tile<T, E, 1, NV>(g, g.a_row, m, n0);
}

// Rounds `cols` up to whole vectors: B and C must have room, and the padding of B must be finite.
template <class T, class E = T>
inline void gemm(int64_t rows, int64_t cols, const GemmArgs<T, E>& g) {
  constexpr int L = kLanes<T>;
  int64_t vectors = ceil_div(cols, L);
  int64_t n = 0;
  if (vectors % 3 == 0) {
    for (; vectors >= 3; vectors -= 3, n += 3 * L) gemm_panel<T, E, kRowsBy3, 3>(g, rows, n);
  }
  for (; vectors >= 2; vectors -= 2, n += 2 * L) gemm_panel<T, E, kRowsBy2, 2>(g, rows, n);
  if (vectors == 1) gemm_panel<T, E, kRowsBy1, 1>(g, rows, n);
}
