// Products of P or dS with a value tile, where a masked element must not let a NaN or Inf through.
//
// The contract: what a row attends to reaches the output, what is masked does not. A masked p is 0, and 0 *
// NaN is NaN; so where a tile is partly masked, rows of B that are not finite are taken out of the product
// and added to just those rows of C that attend to them. Finite data, which is nearly all, pays one read of
// B.

// C (+)= A * B as gemm(). A element (m, k) belongs to score (row m, lane k), or (row k, lane m) if
// a_transposed.
template <class T>
inline void masked_gemm(const ScoreTile<T>& score, bool a_transposed, int64_t rows, int64_t cols,
                        GemmArgs<T> g, T* scratch) {
  if (!score.partial || rows_are_finite(g.b, g.ldb, g.depth, cols)) return gemm(rows, cols, g);

  const T* b = g.b;
  const int64_t ldb = g.ldb, width = round_up_to_lanes<T>(cols);
  for (int64_t k = 0; k < g.depth; ++k) {
    if (row_is_finite(b + k * ldb, cols)) {
      std::copy(b + k * ldb, b + k * ldb + width, scratch + k * width);
    } else {
      std::fill(scratch + k * width, scratch + (k + 1) * width, T(0));
    }
  }
  g.b = scratch;
  g.ldb = width;
  gemm(rows, cols, g);
  for (int64_t k = 0; k < g.depth; ++k) {
    if (row_is_finite(b + k * ldb, cols)) continue;
    for (int64_t m = 0; m < rows; ++m) {
      if (!(a_transposed ? score.attends(k, m) : score.attends(m, k))) continue;
      const T a = g.a[m * g.a_row + k * g.a_depth];
      for (int64_t n = 0; n < cols; ++n) g.c[m * g.ldc + n] += a * b[k * ldb + n];
    }
  }
}
