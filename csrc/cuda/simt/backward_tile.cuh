// Code that the backward kernels share: recomputes P and dS of one tile from q, k, v, lse and delta.
//
//   P = e^(S - lse)    dP = dO V^T    dS = P o (dP - delta)    delta = rowsum(dO o O) - dlse
//
// Each gradient has a separate kernel. A block adds its elements in a fixed order, without atomics. So every run gives
// the same bits, but each kernel recomputes S.
#pragma once

#include "../launch.h"
#include "../scores.cuh"
#include "simt.h"
#include "tile.cuh"

namespace flash_attn_ext::cuda::simt {

// The position of a tile: queries from i0 on, keys from j0 on, of one head.
struct TilePosition {
  int64_t b, h, i0, j0;
};

// The results for one element of a tile.
template <class T>
struct Element {
  T prob;  // P after dropout, for dV
  T dscore;  // gradient of the finished score: for mask and slopes; with functions, of the score before the user's
  T dproduct;  // gradient of <q, k>: for dQ and dK
  bool attends;

  __device__ T dmask() const { return dscore; }
};

// At most `most` rows from `first` on.
template <class In>
__device__ Rows<In> rows_from(const Tensor4& t, int64_t b, int64_t h, int64_t first, int64_t seqlen,
                              int64_t most = kBlockK) {
  return {t.row<In>(b, h, first), t.stride_s, smaller<int64_t>(seqlen - first, most)};
}

template <class T>
__device__ T probability(const RowTerms<T>& rows, int64_t row, T score) {
  return std::exp((score - rows.reference[row]) - rows.correction[row]);
}

// The recompute() of BackwardPass and similar classes: Pass::element() computes an element from the two products.
template <class Pass, bool kWithDscores, class Visit>
__device__ void recompute_tile(const typename Pass::Params& p, const typename Pass::Workspace& w,
                               PhiloxKey key, typename Pass::Memory& shared, const TilePosition& at,
                               const Visit& visit) {
  using In = typename Pass::In;
  using T = typename Pass::T;
  constexpr int kTileRowsOfThread = Pass::kTileRows / kSide;
  const Sizes& z = p.sizes;
  const int64_t h_kv = z.kv_head(at.h);
  const bool given_dprobs = kWithDscores && Pass::kTakesDweights && p.dweights;
  // A loop, because the code of a product is long: Q K^T, then dO V^T.
#pragma unroll 1
  for (int n = 0; n < (kWithDscores && !given_dprobs ? 2 : 1); ++n) {
    T products[kTileRowsOfThread][kCols] = {};
    const Tensor4 left = n == 0 ? p.q : p.dout, right = n == 0 ? p.k : p.v;
    add_row_products(shared, rows_from<In>(left, at.b, at.h, at.i0, z.seqlen_q),
                     rows_from<In>(right, at.b, h_kv, at.j0, z.seqlen_k), n == 0 ? z.head_dim : z.head_dim_v,
                     products);
    store_elements(products, n == 0 ? shared.weights : shared.dprobs);
  }
  if (given_dprobs) Pass::load_gradient_of_weights(p, at, shared);
  const TileChunks chunks(p.band, at.i0);
#pragma unroll 1
  for (int e = 0; e < kTileRowsOfThread * kCols; ++e) {
    const int row = tile_row(e / kCols), col = tile_col(e % kCols);
    const T dprob = kWithDscores ? shared.dprobs[row][col] : T(0);
    visit(row, col, Pass::element(p, w, key, at, chunks, row, col, shared.weights[row][col], dprob));
  }
}

// The first derivative. A template argument of the kernels of backward.cuh and backward_mask.cuh; double_backward.cuh
// has the class of the second derivative.
//
// A call with p.dweights has the gradient of P's average over the heads in place of dP. A choice for each tile, because a
// second set of kernels would double the code.
template <class In_>
struct BackwardPass {
  using In = In_;
  using T = Accumulator<In>;
  using Params = BackwardParams;
  using Workspace = BackwardWorkspace<T>;
  static constexpr int kTileRows = kPassBlockQ<T>;  // query rows of a tile
  static constexpr bool kTakesDweights = true, kHasFunctions = false;

  struct Memory : SharedMemory<T, kTileRows> {
    ScoreTile<T, kTileRows> dprobs;
  };

  static __device__ Element<T> element(const Params& p, const Workspace& w, PhiloxKey key,
                                       const TilePosition& at, const TileChunks& chunks, int row, int col,
                                       T product, T dprob) {
    const Sizes& z = p.sizes;
    const int64_t i = at.i0 + row, j = at.j0 + col;
    const bool inside = i < z.seqlen_q && j < z.seqlen_k;
    const Score<T> score = finish_score(p, chunks, product, at.b, at.h, i, j, inside);
    if (score.value == -kInf<T>) return {T(0), T(0), T(0), score.attends};  // for every dP and lse

    const int64_t n = p.lse_index(at.b, at.h, i);
    const T prob = probability(w.rows, n, score.value);
    const T factor = p.dropout ? dropout_factor<T>(p, key, at.b, at.h, i, j) : T(1);
    const T dscore = prob * (dprob * factor - w.rows.delta[n]);
    T dproduct = dscore * static_cast<T>(p.scale);
    if (p.softcap > 0) dproduct *= T(1) - score.tanh * score.tanh;
    return {prob * factor, dscore, dproduct, score.attends};
  }

  // dP if the result is the average of P over the heads. A thread loads its own elements.
  static __device__ void load_gradient_of_weights(const Params& p, const TilePosition& at, Memory& shared) {
    const Rows<In> rows = rows_from<In>(p.dweights, at.b, at.h, at.i0, p.sizes.seqlen_q, kTileRows);
#pragma unroll 1
    for (int e = 0; e < kTileRows / kSide * kCols; ++e) {
      const int row = tile_row(e / kCols), col = tile_col(e % kCols);
      const bool inside = row < rows.count && at.j0 + col < p.sizes.seqlen_k;
      shared.dprobs[row][col] = inside ? widen(rows(row)[at.j0 + col]) / static_cast<T>(p.sizes.heads) : T(0);
    }
  }

  // Recomputes one tile and calls visit(row, col, element) for each of the thread's elements. Without kWithDscores only
  // element.prob is valid.
  template <bool kWithDscores, class Visit>
  static __device__ void recompute(const Params& p, const Workspace& w, PhiloxKey key, Memory& shared,
                                   const TilePosition& at, const Visit& visit) {
    recompute_tile<BackwardPass, kWithDscores>(p, w, key, shared, at, visit);
  }

  // Stores an element that recompute() visits as a weight of add_to_dq() and add_to_dk().
  static __device__ void store_weights(Memory& shared, int row, int col, const Element<T>& element) {
    shared.weights[row][col] = weight_of(element.dproduct, element.attends);
  }

  // dq += dS K, dk += dS^T Q, in the slice of columns from `first_col` on.
  template <int kAccRows, int kSliceCols>
  static __device__ void add_to_dq(const Params& p, Memory& shared, const TilePosition& at, int64_t first_col,
                                   bool partial, T (&dq)[kAccRows][kSliceCols]) {
    const Sizes& z = p.sizes;
    add_weighted_rows<false>(shared, shared.weights,
                             rows_from<In>(p.k, at.b, z.kv_head(at.h), at.j0, z.seqlen_k), first_col,
                             z.head_dim, partial, dq);
  }
  template <int kAccRows, int kSliceCols>
  static __device__ void add_to_dk(const Params& p, Memory& shared, const TilePosition& at, int64_t first_col,
                                   bool partial, T (&dk)[kAccRows][kSliceCols]) {
    add_weighted_rows<true>(shared, shared.weights,
                            rows_from<In>(p.q, at.b, at.h, at.i0, p.sizes.seqlen_q, kTileRows), first_col,
                            p.sizes.head_dim, partial, dk);
  }
};
static_assert(sizeof(BackwardPass<float>::Memory) <= (48 << 10), "runs on every GPU without opting in");
static_assert(sizeof(BackwardPass<double>::Memory) <= kTuringSharedBytes);

// Writes a block's slice of a gradient, rows from `first` on.
template <class In, class T, int kAccRows, int kSliceCols>
__device__ void store_gradient(const Tensor4& grad, int64_t b, int64_t h, int64_t first, int64_t seqlen,
                               int64_t first_col, int64_t columns, const T (&acc)[kAccRows][kSliceCols]) {
#pragma unroll
  for (int r = 0; r < kAccRows; ++r) {
    const int64_t row = first + tile_row(r);
    if (row >= seqlen) continue;
#pragma unroll
    for (int c = 0; c < kSliceCols; ++c) {
      const int64_t col = first_col + tile_col(c);
      if (col < columns) grad.row<In>(b, h, row)[col] = round_to<In>(acc[r][c]);
    }
  }
}

// Whether a tile of `rows` queries may have hidden elements.
__device__ inline bool is_partial(const BackwardParams& p, const TilePosition& at, int rows) {
  const int64_t i_end = smaller<int64_t>(at.i0 + rows, p.sizes.seqlen_q);
  const int64_t j_end = smaller<int64_t>(at.j0 + kBlockK, p.sizes.seqlen_k);
  return p.mask || !band_covers(p.band, at.i0, i_end, at.j0, j_end);
}

}  // namespace flash_attn_ext::cuda::simt
