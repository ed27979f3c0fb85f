// What the backward kernels share: recompute P and dS of one tile from q, k, v, lse and delta.
//
//   P = e^(S - lse)    dP = dO V^T    dS = P o (dP - delta)    delta = rowsum(dO o O) - dlse
//
// Every gradient has a kernel of its own, in which a block owns what it writes and adds in a fixed order: no
// atomics, the same bits at every run, at the price of recomputing S for each.
#pragma once

#include "../launch.h"
#include "../scores.cuh"
#include "simt.h"
#include "tile.cuh"

namespace flash_attn_ext::cuda::simt {

// Where a tile lies: queries from i0, keys from j0, of one head.
struct TilePlace {
  int64_t b, h, i0, j0;
};

template <class T>
struct BackwardMemory : SharedMemory<T, kBlockQ> {
  ScoreTile<T, kBlockQ> dprobs;
};
static_assert(sizeof(BackwardMemory<float>) <= (48 << 10), "runs on every GPU without opting in");
static_assert(sizeof(BackwardMemory<double>) <= kMaxSharedBytes);

// What one element of a tile gives.
template <class T>
struct Element {
  T prob;      // P after dropout: what dV is made of
  T dscore;    // gradient of the finished score: what the mask and the slopes get
  T dproduct;  // gradient of <q, k>: what dQ and dK are made of
  bool attends;
};

template <class In>
__device__ Rows<In> rows_from(const Tensor4& t, int64_t b, int64_t h, int64_t first, int64_t seqlen) {
  return {t.row<In>(b, h, first), t.stride_s, smaller<int64_t>(seqlen - first, kBlockQ)};
}

template <class T>
__device__ Element<T> backward_element(const BackwardParams& p, const RowTerms<T>& terms, PhiloxKey key,
                                       const TilePlace& at, int row, int col, T product, T dprob) {
  const Sizes& z = p.sizes;
  const int64_t i = at.i0 + row, j = at.j0 + col;
  const bool inside = i < z.seqlen_q && j < z.seqlen_k;
  const Score<T> score = finish_score(p, product, at.b, at.h, i, j, inside);
  if (score.value == -kInf<T>) return {T(0), T(0), T(0), score.attends};  // whatever dP and lse hold

  const int64_t n = p.statistics_row(at.b, at.h, i);
  const T prob = std::exp((score.value - terms.reference[n]) - terms.correction[n]);
  const T factor = p.dropout ? dropout_factor<T>(p, key, at.b, at.h, i, j) : T(1);
  const T dscore = prob * (dprob * factor - terms.delta[n]);
  T dproduct = dscore * static_cast<T>(p.scale);
  if (p.softcap > 0) dproduct *= T(1) - score.tanh * score.tanh;
  return {prob * factor, dscore, dproduct, score.attends};
}

// Recomputes one tile and calls visit(row, col, element) for each of the thread's elements. Without
// kWithDscores only the element's prob is right.
template <bool kWithDscores, class In, class T, class Visit>
__device__ void recompute_tile(const BackwardParams& p, const RowTerms<T>& terms, PhiloxKey key,
                               BackwardMemory<T>& shared, const TilePlace& at, const Visit& visit) {
  const Sizes& z = p.sizes;
  const int64_t h_kv = z.kv_head(at.h);
  T products[kRows][kCols] = {};
  add_row_products(shared, rows_from<In>(p.q, at.b, at.h, at.i0, z.seqlen_q),
                   rows_from<In>(p.k, at.b, h_kv, at.j0, z.seqlen_k), z.head_dim, products);
  store_elements(products, shared.weights);
  if constexpr (kWithDscores) {
    T dprobs[kRows][kCols] = {};
    add_row_products(shared, rows_from<In>(p.dout, at.b, at.h, at.i0, z.seqlen_q),
                     rows_from<In>(p.v, at.b, h_kv, at.j0, z.seqlen_k), z.head_dim_v, dprobs);
    store_elements(dprobs, shared.dprobs);
  }
#pragma unroll 1
  for (int e = 0; e < kRows * kCols; ++e) {
    const int row = tile_row(e / kCols), col = tile_col(e % kCols);
    const T dprob = kWithDscores ? shared.dprobs[row][col] : T(0);
    visit(row, col, backward_element(p, terms, key, at, row, col, shared.weights[row][col], dprob));
  }
}

// Writes a block's slice of a gradient, of rows [first, first + 64).
template <class In, class T, int kSliceCols>
__device__ void store_gradient(const Tensor4& grad, int64_t b, int64_t h, int64_t first, int64_t seqlen,
                               int64_t first_col, int64_t columns, const T (&acc)[kRows][kSliceCols]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + tile_row(r);
    if (row >= seqlen) continue;
#pragma unroll
    for (int c = 0; c < kSliceCols; ++c) {
      const int64_t col = first_col + tile_col(c);
      if (col < columns) grad.row<In>(b, h, row)[col] = round_to<In>(acc[r][c]);
    }
  }
}

// Whether some element of the tile may be masked.
__device__ inline bool is_partial(const BackwardParams& p, const TilePlace& at) {
  const int64_t i_end = smaller<int64_t>(at.i0 + kBlockQ, p.sizes.seqlen_q);
  const int64_t j_end = smaller<int64_t>(at.j0 + kBlockK, p.sizes.seqlen_k);
  return p.mask || !band_covers(p.band, at.i0, i_end, at.j0, j_end);
}

}  // namespace flash_attn_ext::cuda::simt
