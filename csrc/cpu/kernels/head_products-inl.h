// The products of attention by index that sum over the heads of one query row. dV = P^T dO and dK = dS^T Q have one row
// for each gathered key. Q and dO are loaded once for each query row.
#pragma once

#include "indexed_tile-inl.h"

template <class In, class T>
struct HeadProducts {
  T* tile;         // [heads][cols]   only if the caller's memory cannot be read directly
  T* finite_tile;  // [heads][cols]   for masked_gemm
  Tile<T> rows;
  int64_t cols;

  static HeadProducts allocate(Arena& arena, int64_t cols) {
    const int64_t ld = round_up_to_lanes<T>(cols);
    HeadProducts r{};
    r.tile = arena.take<T>(block_of_heads() * ld);
    r.finite_tile = arena.take<T>(block_of_heads() * ld);
    r.cols = cols;
    return r;
  }

  // Loads the rows of heads [h, h + heads) of `t`, which has one row for each head.
  void load_heads(const Tensor4& t, int64_t h, int64_t heads) {
    rows = load_tile<In, T>(t.row<In>(0, 0, h), t.stride_s, heads, cols, tile);
  }

  // sum[key] (+)= sum over heads of factor[key][head] * rows[head]
  void multiply(const ScoreTile<T>& score, T* factor, T* sum, bool accumulate) const {
    const TileFrame& f = score.frame;
    masked_gemm<T>(
        score, false, f.keys, cols,
        {f.queries, factor, f.ld, 1, rows.data, rows.ld, sum, round_up_to_lanes<T>(cols), accumulate},
        finite_tile);
  }
};

#if defined(FA_DOT_BFLOAT16)

// The form for bfloat16 operands without widening. P and dS are rounded to bfloat16.
template <>
struct HeadProducts<BFloat16, float> {
  Pair* across;   // [heads / 2][cols]
  Pair* finite;   // [heads / 2][cols]   without rows that are not finite
  Pair* weights;  // [keys][heads / 2]   P or dS
  Rows<BFloat16> rows;
  bool is_finite;

  static HeadProducts allocate(Arena& arena, int64_t cols) {
    const int64_t ld = round_up_to_lanes<float>(cols), heads = pairs_of(block_of_heads());
    HeadProducts r{};
    r.across = arena.take<Pair>(heads * ld);
    r.finite = arena.take<Pair>(heads * ld);
    r.weights = arena.take<Pair>(kGatheredKeys * heads);
    r.rows.cols = cols;
    return r;
  }

  void load_heads(const Tensor4& t, int64_t h, int64_t heads) {
    const int64_t ld = round_up_to_lanes<float>(rows.cols);
    rows = {t.row<BFloat16>(0, 0, h), t.stride_s, rows.cols};
    load_pairs_across(rows.data, rows.stride, heads, rows.cols, across, ld);
    is_finite = rows_are_finite<BFloat16, float>(rows, heads);
    if (is_finite) return;
    load_pairs_across(rows.data, rows.stride, heads, rows.cols, finite, ld);
    clear_rows_not_finite(rows, heads, finite, ld);
  }

  // Padding lanes of `factor` are 0, so an odd number of heads may end with half a pair.
  void multiply(const ScoreTile<float>& score, const float* factor, float* sum, bool accumulate) const {
    const TileFrame& f = score.frame;
    const int64_t ld = round_up_to_lanes<float>(rows.cols);
    const bool clear = score.partial && !is_finite;
    for (int64_t n = 0; n < f.keys * f.ld; n += kLanes<float>)
      store_as<BFloat16, float>(reinterpret_cast<BFloat16*>(weights) + n, load<float>(factor + n));
    gemm<float, Pair>(
        f.keys, rows.cols,
        {pairs_of(f.queries), weights, f.ld / 2, 1, clear ? finite : across, ld, sum, ld, accumulate});
    if (clear)
      add_rows_not_finite<BFloat16, float>(score, false, f.keys, factor, f.ld, 1, rows, f.queries, sum, ld);
  }
};

#endif
