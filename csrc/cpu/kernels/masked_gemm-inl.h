// Products of P or dS with a tile of rows, if a masked row may contain NaN or Inf.
//
// The contract: attended values reach the output, masked values do not. P = 0 for a masked value, but 0 * NaN is NaN.
// So in a partly masked tile, rows of B that are not finite are removed from the product. Then these rows are added to
// the rows of C that attend to them. For finite data, the usual case, this needs one more read of B.
#pragma once

#include "gemm-inl.h"
#include "scores-inl.h"
#include "tiles-inl.h"

// C[m] += A[m][k] * B[k] for the rows k of B that are not finite, and the rows m of C that attend to them. Element
// (m, k) of A belongs to score (row m, lane k), or (row k, lane m) if a_transposed.
template <class In, class T, class RowsOfB>
inline void add_rows_not_finite(const ScoreTile<T>& score, bool a_transposed, int64_t rows, const T* a,
                                int64_t a_row, int64_t a_depth, const RowsOfB& b, int64_t depth, T* c,
                                int64_t ldc) {
  for (int64_t k = 0; k < depth; ++k) {
    if (rows_are_finite<In, T>(Rows<In>{b.row(k), b.stride, b.cols}, 1)) continue;
    for (int64_t m = 0; m < rows; ++m) {
      if (!(a_transposed ? score.attends(k, m) : score.attends(m, k))) continue;
      const T factor = a[m * a_row + k * a_depth];
      for (int64_t n = 0; n < b.cols; ++n) c[m * ldc + n] += factor * scalar_as<T>(b.row(k)[n]);
    }
  }
}

// C (+)= A * B, for a partly masked tile. `a_transposed` as above. multiply(g) computes the product: all of it, or without the
// keys that a query does not see.
template <class T, class Multiply>
inline void masked_gemm(const ScoreTile<T>& score, bool a_transposed, int64_t rows, int64_t cols,
                        const GemmArgs<T>& g, T* scratch, const Multiply& multiply) {
  const Rows<T> b{g.b, g.ldb, cols};
  if (!score.partial || rows_are_finite<T, T>(b, g.depth)) return multiply(g);
  const int64_t width = round_up_to_lanes<T>(cols);
  for (int64_t k = 0; k < g.depth; ++k) {
    if (rows_are_finite<T, T>({b.row(k), b.stride, cols}, 1)) {
      std::copy(b.row(k), b.row(k) + width, scratch + k * width);
    } else {
      std::fill(scratch + k * width, scratch + (k + 1) * width, T(0));
    }
  }
  GemmArgs<T> finite = g;
  finite.b = scratch;
  finite.ldb = width;
  multiply(finite);
  add_rows_not_finite<T, T>(score, a_transposed, rows, g.a, g.a_row, g.a_depth, b, g.depth, g.c, g.ldc);
}
template <class T>
inline void masked_gemm(const ScoreTile<T>& score, bool a_transposed, int64_t rows, int64_t cols,
                        const GemmArgs<T>& g, T* scratch) {
  masked_gemm<T>(score, a_transposed, rows, cols, g, scratch,
                 [&](const GemmArgs<T>& finite) { gemm(rows, cols, finite); });
}
