// The attention weights averaged over the heads, W = 1/H sum_h P_h after dropout. Their backward is the backward of
// attention (backward.cuh) with a given dP.
//
//   weights_kernel            a block owns 64 x 64 weights (fp64: 32 x 64), and adds P of all heads in order
// delta_of_weights_kernel for the backward: delta = rowsum(P o dP), because there is no out; a block owns queries of a
// head
#pragma once

#include "backward_tile.cuh"

namespace flash_attn_ext::cuda::simt {

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    weights_kernel(const WeightsParams p, const BackwardWorkspace<T> w) {
  using Pass = BackwardPass<In>;
  auto& shared = shared_memory<typename Pass::Memory>();
  const Sizes& z = p.sizes;
  const int64_t columns = ceil_div(z.seqlen_k, kBlockK),
                blocks = columns * ceil_div(z.seqlen_q, kPassBlockQ<T>);
  const int64_t b = blockIdx.x / blocks, j0 = blockIdx.x % columns * kBlockK;
  const int64_t i0 = blockIdx.x % blocks / columns * kPassBlockQ<T>;
  const PhiloxKey key = dropout_key(p.dropout);

  T sum[kPassRows<T>][kCols] = {};
  const Range seen = visible_keys(p.band, i0, smaller<int64_t>(i0 + kPassBlockQ<T>, z.seqlen_q), z.seqlen_k);
  if (j0 < seen.end && j0 + kBlockK > seen.begin)
    for (int64_t h = 0; h < z.heads; ++h) {
      Pass::template recompute<false>(
          p, w, key, shared, {b, h, i0, j0},
          [&](int row, int col, const auto& element) { shared.weights[row][col] = element.prob; });
#pragma unroll
      for (int r = 0; r < kPassRows<T>; ++r)
#pragma unroll
        for (int c = 0; c < kCols; ++c) sum[r][c] += shared.weights[tile_row(r)][tile_col(c)];
    }
#pragma unroll
  for (int r = 0; r < kPassRows<T>; ++r) {
    const int64_t i = i0 + tile_row(r);
    if (i >= z.seqlen_q) continue;
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const int64_t j = j0 + tile_col(c);
      if (j < z.seqlen_k) p.weights.row<In>(b, 0, i)[j] = round_to<In>(sum[r][c] / static_cast<T>(z.heads));
    }
  }
}

// w.rows.delta is 0 before this, so dS is P o dP.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    delta_of_weights_kernel(const BackwardParams p, const BackwardWorkspace<T> w) {
  using Pass = BackwardPass<In>;
  auto& shared = shared_memory<typename Pass::Memory>();
  const Sizes& z = p.sizes;
  const int64_t blocks = ceil_div(z.seqlen_q, kPassBlockQ<T>), head = blockIdx.x / blocks;
  const int64_t b = head / z.heads, h = head % z.heads, i0 = blockIdx.x % blocks * kPassBlockQ<T>;
  const PhiloxKey key = dropout_key(p.dropout);

  T delta[kPassRows<T>] = {};
  const Range seen = visible_keys(p.band, i0, smaller<int64_t>(i0 + kPassBlockQ<T>, z.seqlen_q), z.seqlen_k);
  for (int64_t j0 = seen.begin / kBlockK * kBlockK; j0 < seen.end; j0 += kBlockK) {
    Pass::template recompute<true>(
        p, w, key, shared, {b, h, i0, j0},
        [&](int row, int col, const auto& element) { shared.weights[row][col] = element.dscore; });
#pragma unroll
    for (int r = 0; r < kPassRows<T>; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) delta[r] += shared.weights[tile_row(r)][tile_col(c)];
  }
#pragma unroll
  for (int r = 0; r < kPassRows<T>; ++r) {
    const T total = row_total(delta[r]);  // protects delta[r]: all threads of the row have read the old value
    const int64_t i = i0 + tile_row(r);
    if (i < z.seqlen_q && thread_x() == 0) w.rows.delta[p.lse_index(b, h, i)] = total;
  }
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_delta_of_weights(const BackwardParams& p, const BackwardWorkspace<T>& w,
                                    cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const int64_t tasks = z.batch * z.heads * ceil_div(z.seqlen_q, kPassBlockQ<T>);
  const LaunchShape shape{p.dweights ? tasks : 0, 1, 1, kThreads, sizeof(typename BackwardPass<In>::Memory)};
  return launch(delta_of_weights_kernel<In>, shape, stream, p, w);
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_weights(const WeightsParams& p, void* workspace, ComputeRowTerms<T>* row_terms,
                           cudaStream_t stream) {
  Arena arena(workspace);
  const auto w = BackwardWorkspace<T>::lay_out(arena, p);
  const Sizes& z = p.sizes;
  const int64_t tasks = z.batch * ceil_div(z.seqlen_q, kPassBlockQ<T>) * ceil_div(z.seqlen_k, kBlockK);
  const LaunchShape shape{tasks, 1, 1, kThreads, sizeof(typename BackwardPass<In>::Memory)};
  return in_order([&] { return row_terms(p, w.rows, stream); },
                  [&] { return launch(weights_kernel<In>, shape, stream, p, w); });
}

}  // namespace flash_attn_ext::cuda::simt
