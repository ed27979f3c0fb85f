// Double backward: the gradient of <t_out, dout> + <t_lse, dlse> with respect to q, k, v, mask, slopes and sink
// (docs/derivative_formulas.md). The kernels are the backward's. Per tile, from the tangent e of the scores,
// g = R o dO V^T and f = R o dO tV^T:
//
//   dS = P o (g - delta)    A = (g - delta) o e + f - mu g    G = P o (A - gamma)
//   Z  = scale (y' G + y'' scale w dS)                        D = scale y' dS
//   dV_j += (R P (e - mu))^T dO    dK_j += Z^T Q + D^T tQ     dQ_i += Z K + D tK
//
// gamma = <dO, tO> - mu delta needs no scores, because tO is an input.
#pragma once

#include "../tangents.cuh"
#include "launch_backward.cuh"

namespace flash_attn_ext::cuda::simt {

// In the backward's Element, prob is R P (e - mu), dscore is G and dproduct is Z.
template <class T>
struct SecondOrderElement : Element<T> {
  T t_dproduct;  // D
};

template <class In_>
struct DoubleBackwardPass {
  using In = In_;
  using T = Accumulator<In>;
  using Params = DoubleBackwardParams;
  using Workspace = DoubleBackwardWorkspace<T>;
  static constexpr int kTileRows = kDoubleBlockQ<T>;
  static constexpr bool kHasFunctions = false;

  struct Memory : SharedMemory<T, kTileRows> {  // weights: <q, k>, then Z
    ScoreTile<T, kTileRows> t_weights;          // w, then D
    ScoreTile<T, kTileRows> dprobs, t_dprobs;   // dO V^T and dO tV^T
  };

  struct Products {
    T product, t_product, dprob, t_dprob;
  };

  static __device__ SecondOrderElement<T> element(const Params& p, const Workspace& w, PhiloxKey key,
                                                  const TilePosition& at, const TileChunks& chunks, int row,
                                                  int col, const Products& products) {
    const Sizes& z = p.sizes;
    const int64_t i = at.i0 + row, j = at.j0 + col;
    const bool inside = i < z.seqlen_q && j < z.seqlen_k;
    const Score<T> score = finish_score(p, chunks, products.product, at.b, at.h, i, j, inside);
    if (score.value == -kInf<T>) return {{T(0), T(0), T(0), score.attends}, T(0)};  // for every other value

    const int64_t n = p.lse_index(at.b, at.h, i);
    const ScoreTangent<T> e = tangent_of(p, p.tangents, score, products.t_product, at.b, at.h, i, j);
    const T prob = probability(w.rows, n, score.value), mu = static_cast<const T*>(p.t_lse)[n];
    const T factor = p.dropout ? dropout_factor<T>(p, key, at.b, at.h, i, j) : T(1);
    const T g = factor * products.dprob, f = factor * products.t_dprob, from_delta = g - w.rows.delta[n];
    const T dscore = prob * from_delta, t_dscore = prob * (from_delta * e.value + f - mu * g - w.gamma[n]);
    const T scale = static_cast<T>(p.scale), through = scale * (T(1) - score.tanh * score.tanh);
    return {{prob * factor * (e.value - mu), t_dscore, through * t_dscore + scale * e.curvature * dscore,
             score.attends},
            through * dscore};
  }

  // As in the backward: without kWithDscores only element.prob is valid.
  template <bool kWithDscores, class Visit>
  static __device__ void recompute(const Params& p, const Workspace& w, PhiloxKey key, Memory& shared,
                                   const TilePosition& at, const Visit& visit) {
    const Sizes& z = p.sizes;
    const Tangents& t = p.tangents;
    const auto query_rows = [&](const Tensor4& tensor) {
      return rows_from<In>(tensor, at.b, at.h, at.i0, z.seqlen_q);
    };
    const auto key_rows = [&](const Tensor4& tensor) {
      return rows_from<In>(tensor, at.b, z.kv_head(at.h), at.j0, z.seqlen_k);
    };
    // A loop, because the code of a product is long: Q K^T; tQ K^T + Q tK^T; dO V^T; dO tV^T.
    T products[kDoubleRows<T>][kCols] = {};
#pragma unroll 1
    for (int n = 0; n < (kWithDscores ? 5 : 3); ++n) {
      const Rows<In> left = n == 1 ? query_rows(t.q) : n < 3 ? query_rows(p.q) : query_rows(p.dout);
      const Rows<In> right = n < 2    ? key_rows(p.k)
                             : n == 2 ? key_rows(t.k)
                             : n == 3 ? key_rows(p.v)
                                      : key_rows(t.v);
      add_row_products(shared, left, right, n < 3 ? z.head_dim : z.head_dim_v, products);
      if (n == 1) continue;
      store_elements(products, n == 0   ? shared.weights
                               : n == 2 ? shared.t_weights
                               : n == 3 ? shared.dprobs
                                        : shared.t_dprobs);
      for (auto& row : products)
        for (T& product : row) product = T(0);
    }
    const TileChunks chunks(p.band, at.i0);
#pragma unroll 1
    for (int e = 0; e < kDoubleRows<T> * kCols; ++e) {
      const int row = tile_row(e / kCols), col = tile_col(e % kCols);
      Products products{shared.weights[row][col], shared.t_weights[row][col], T(0), T(0)};
      if constexpr (kWithDscores) {
        products.dprob = shared.dprobs[row][col];
        products.t_dprob = shared.t_dprobs[row][col];
      }
      visit(row, col, element(p, w, key, at, chunks, row, col, products));
    }
  }

  static __device__ void store_weights(Memory& shared, int row, int col,
                                       const SecondOrderElement<T>& element) {
    shared.weights[row][col] = weight_of(element.dproduct, element.attends);
    shared.t_weights[row][col] = weight_of(element.t_dproduct, element.attends);
  }

  // dq += Z K + D tK, dk += Z^T Q + D^T tQ.
  template <int kAccRows, int kSliceCols>
  static __device__ void add_to_dq(const Params& p, Memory& shared, const TilePosition& at, int64_t first_col,
                                   bool partial, T (&dq)[kAccRows][kSliceCols]) {
    const auto rows = [&](const Tensor4& keys) {
      return rows_from<In>(keys, at.b, p.sizes.kv_head(at.h), at.j0, p.sizes.seqlen_k);
    };
#pragma unroll 1
    for (int n = 0; n < 2; ++n)
      add_weighted_rows<false>(shared, n == 0 ? shared.weights : shared.t_weights,
                               n == 0 ? rows(p.k) : rows(p.tangents.k), first_col, p.sizes.head_dim, partial,
                               dq);
  }
  template <int kAccRows, int kSliceCols>
  static __device__ void add_to_dk(const Params& p, Memory& shared, const TilePosition& at, int64_t first_col,
                                   bool partial, T (&dk)[kAccRows][kSliceCols]) {
    const auto rows = [&](const Tensor4& queries) {
      return rows_from<In>(queries, at.b, at.h, at.i0, p.sizes.seqlen_q, kTileRows);
    };
#pragma unroll 1
    for (int n = 0; n < 2; ++n)
      add_weighted_rows<true>(shared, n == 0 ? shared.weights : shared.t_weights,
                              n == 0 ? rows(p.q) : rows(p.tangents.q), first_col, p.sizes.head_dim, partial,
                              dk);
  }
};
static_assert(sizeof(DoubleBackwardPass<float>::Memory) <= (48 << 10), "runs on every GPU without opting in");
static_assert(sizeof(DoubleBackwardPass<double>::Memory) <= kTuringSharedBytes);

// Computes gamma and the terms of the sink's gradient. 16 threads share a row, a block has 16 rows.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    gamma_kernel(const DoubleBackwardParams call, const DoubleBackwardWorkspace<T> w) {
  const int64_t blocks = ceil_div(call.sizes.seqlen_q, kSide), head = blockIdx.x / blocks;
  const int64_t b = head / call.sizes.heads, h = head % call.sizes.heads;
  const int64_t i = blockIdx.x % blocks * kSide + thread_y();
  const DoubleBackwardParams p = of_sequence(call, b);
  T dot = 0;
  if (i < p.sizes.seqlen_q) {
    const In *dout = p.dout.row<In>(b, h, i), *t_out = p.t_out.row<In>(b, h, i);
    for (int64_t c = thread_x(); c < p.sizes.head_dim_v; c += kSide) dot += widen(dout[c]) * widen(t_out[c]);
  }
  dot = row_total(dot);
  if (i >= p.sizes.seqlen_q || thread_x() != 0) return;
  const int64_t n = p.lse_index(b, h, i);
  const T delta = w.rows.delta[n], gamma = dot - static_cast<const T*>(p.t_lse)[n] * delta;
  w.gamma[n] = gamma;
  if (p.dsink) w.sink_terms[n] = delta * (p.tangents.sink ? p.tangents.sink.of<T>(b, h) : T(0)) + gamma;
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_double_backward(const DoubleBackwardParams& p, void* workspace, cudaStream_t stream,
                                   ComputeRowTerms<T>* row_terms) {
  const Sizes& z = p.sizes;
  Arena arena(workspace);
  const auto w = DoubleBackwardWorkspace<T>::lay_out(arena, p);
  const LaunchShape by_rows{z.batch * z.heads * ceil_div(z.seqlen_q, kSide), 1, 1, kThreads};
  return in_order([&] { return row_terms(p, w.rows, stream); },
                  [&] { return launch(gamma_kernel<In>, by_rows, stream, p, w); },
                  [&] { return launch_passes<DoubleBackwardPass<In>>(p, w, stream); },
                  [&] { return launch_sink_gradient<T>(p, w.sink_terms, RowOfLse{}, stream); });
}

}  // namespace flash_attn_ext::cuda::simt
