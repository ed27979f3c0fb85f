// Backward: FlashAttention-2, algorithm 2. Each gradient has a kernel in which only one block writes an element.
//
//   row_terms_kernel  delta, and the terms from which P is recomputed   a block has 64 queries of a head
//   dq_kernel         dQ += dS K, partial sums of dslopes               the same, and a slice of the D columns
//   dkv_kernel        dV += P^T dO  or  dK += dS^T Q                    64 keys of a key head, and a slice
//   dslopes_kernel    adds the partial sums                             a thread has a head
#pragma once

#include "backward_tile.cuh"
#include "forward.cuh"

namespace flash_attn_ext::cuda::simt {

// Whether lse = m + log(l) is exact enough. For scores of 1e9 (masks of finfo.min or -1e9) rounding removes log(l).
// e^(S - lse) is then wrong by a factor of up to the length of the row. NaN counts as exact, so it stays NaN.
template <class T>
__device__ bool lse_is_exact(T lse) {
  return !(std::abs(lse) * std::numeric_limits<T>::epsilon() > T(1e-3)) || std::isinf(lse);
}

// Recomputes the maxima and sums of rows, for a block with an lse that is too large to be exact. The overload in
// flex.cuh is for functions of the user.
template <class In, class T>
__device__ void add_tiles(const BackwardParams& p, std::nullptr_t, SharedMemory<T, kBlockQ>& shared,
                          int64_t b, int64_t h, int64_t i0, RowStatistics<T, kRows>& statistics) {
  const Sizes& z = p.sizes;
  const Rows<In> q = rows_from<In>(p.q, b, h, i0, z.seqlen_q);
  const QueryTile<false> tile{b, h, i0, q.count, z.seqlen_q};
  const Range seen = visible_keys(p.band, i0, i0 + q.count, z.seqlen_k);
  for (int64_t j0 = seen.begin / kBlockK * kBlockK; j0 < seen.end; j0 += kBlockK) {
    T products[kRows][kCols] = {}, factor[kRows];
    add_row_products(shared, q, rows_from<In>(p.k, b, z.kv_head(h), j0, z.seqlen_k), z.head_dim, products);
    store_elements(products, shared.weights);
    const uint32_t attends = finish_scores<T, kBlockQ>(p, tile, j0, shared.weights);
    statistics.update(shared.weights, attends, factor);
  }
}

// `functions`: functions of the user, or nullptr.
template <class In, class T, class Functions>
__device__ void recompute_row_sums(const BackwardParams& p, const RowTerms<T>& terms, Functions functions,
                                   SharedMemory<T, kBlockQ>& shared, int64_t b, int64_t h, int64_t i0) {
  const Sizes& z = p.sizes;
  RowStatistics<T, kRows> statistics;
  add_tiles<In>(p, functions, shared, b, h, i0, statistics);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const T sum = row_total(statistics.sum[r]);
    const int64_t i = i0 + tile_row(r);
    if (i >= z.seqlen_q || thread_x() != 0) continue;
    const int64_t row = p.lse_index(b, h, i);
    if (lse_is_exact(static_cast<const T*>(p.lse)[row])) continue;
    const RowSum<T> all = add_sink(p, b, h, RowSum<T>{statistics.max[r], sum});
    terms.reference[row] = all.max;
    terms.correction[row] = std::log(all.sum);
  }
}

template <class In, class T, class Functions>
__device__ void compute_row_terms(const BackwardParams& call, const RowTerms<T>& terms, Functions functions) {
  auto& shared = shared_memory<SharedMemory<T, kBlockQ>>();
  const int64_t blocks = ceil_div(call.sizes.seqlen_q, kBlockQ), head = blockIdx.x / blocks;
  const int64_t b = head / call.sizes.heads, h = head % call.sizes.heads, i0 = blockIdx.x % blocks * kBlockQ;
  const BackwardParams p = of_sequence(call, b);
  const Sizes& z = p.sizes;
  if (i0 >= z.seqlen_q) return;  // the sequence ends before these rows

  bool inexact = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t i = i0 + tile_row(r), row = p.lse_index(b, h, i);
    T dot = 0;
    if (i < z.seqlen_q) {
      const In *dout = p.dout.row<In>(b, h, i), *out = p.out.row<In>(b, h, i);
      for (int64_t c = thread_x(); c < z.head_dim_v; c += kSide) dot += widen(dout[c]) * widen(out[c]);
    }
    dot = row_total(dot);
    if (i >= z.seqlen_q || thread_x() != 0) continue;
    const T lse = static_cast<const T*>(p.lse)[row];
    // A row with all keys hidden has an lse of -inf. Its reference +inf gives P = 0 without Inf - Inf.
    terms.delta[row] = dot - (p.dlse ? static_cast<const T*>(p.dlse)[row] : T(0));
    terms.reference[row] = lse == -kInf<T> ? kInf<T> : lse;
    terms.correction[row] = T(0);
    inexact |= !lse_is_exact(lse);
  }
  const bool some_inexact = __syncthreads_or(inexact);  // all threads branch alike
  if (some_inexact) recompute_row_sums<In>(p, terms, functions, shared, b, h, i0);
}

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    row_terms_kernel(const BackwardParams call, const RowTerms<T> terms) {
  compute_row_terms<In>(call, terms, nullptr);
}

// The sum over all threads of the block. Only thread 0 has the result.
template <class T, int kTileRows>
__device__ T block_total(T x, SharedMemory<T, kTileRows>& shared) {
  x = row_total(x);
  __syncthreads();  // all threads have read the weights
  if (thread_x() == 0) shared.weights[0][thread_y()] = x;
  __syncthreads();  // publishes the 16 partial sums
  T total = 0;
  for (int n = 0; n < kSide; ++n) total += shared.weights[0][n];
  return total;
}

template <class Pass, int kSlice, class T = typename Pass::T>
__global__ void __launch_bounds__(kThreads, 1)
    dq_kernel(const typename Pass::Params call, const typename Pass::Workspace w) {
  constexpr int kTileRows = Pass::kTileRows;
  auto& shared = shared_memory<typename Pass::Memory>();
  const int64_t blocks = ceil_div(call.sizes.seqlen_q, kTileRows), head = blockIdx.x / blocks;
  const int64_t block = blocks - 1 - blockIdx.x % blocks;  // causal: the longest rows first
  const int64_t b = head / call.sizes.heads, h = head % call.sizes.heads, i0 = block * kTileRows;
  const int64_t first_col = int64_t{blockIdx.y} * kSlice;
  const typename Pass::Params p = of_sequence(call, b);
  const Sizes& z = p.sizes;
  const PhiloxKey key = dropout_key(p.dropout);

  T dq[kTileRows / kSide][kSlice / kSide] = {}, dslope = 0;
  Range seen = visible_keys(p.band, i0, smaller<int64_t>(i0 + kTileRows, z.seqlen_q), z.seqlen_k);
  if (i0 >= z.seqlen_q) seen.end = seen.begin;  // past the end of the sequence: no tiles
  for (int64_t j0 = seen.begin / kBlockK * kBlockK; j0 < seen.end; j0 += kBlockK) {
    const TilePosition at{b, h, i0, j0};
    if constexpr (Pass::kHasFunctions) {
      if (Pass::is_hidden(p, w, at)) continue;
    }
    Pass::template recompute<true>(p, w, key, shared, at, [&](int row, int col, const auto& element) {
      Pass::store_weights(shared, row, col, element);
      if constexpr (Pass::kHasFunctions) Pass::add_to_captured(p, w, at, row, col, element);
      if (p.dalibi_slopes) dslope -= element.dscore * alibi_distance<T>(p.band, i0 + row, j0 + col);
    });
    if (p.dq)
      Pass::add_to_dq(p, shared, at, first_col, Pass::kHasFunctions || is_partial(p, at, kTileRows), dq);
  }
  if (p.dq) store_gradient<typename Pass::In>(p.dq, b, h, i0, z.seqlen_q, first_col, z.head_dim, dq);
  if (p.dalibi_slopes && blockIdx.y == 0) {
    const T total = block_total(dslope, shared);
    if (threadIdx.x == 0) w.dslopes[head * blocks + block] = total;
  }
}

// Adds the partial sums of `blocks` blocks of queries.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    dslopes_kernel(T* dslopes, int64_t heads, const T* parts, int64_t blocks) {
  const int64_t head = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (head >= heads) return;
  T total = 0;
  for (int64_t n = 0; n < blocks; ++n) total += parts[head * blocks + n];
  dslopes[head] = total;
}

enum class KeyGradient { kDk, kDv };

template <class Pass, KeyGradient kWhich, int kSlice, class T = typename Pass::T>
__global__ void __launch_bounds__(kThreads, 1)
    dkv_kernel(const typename Pass::Params call, const typename Pass::Workspace w) {
  using In = typename Pass::In;
  constexpr bool kIsDk = kWhich == KeyGradient::kDk;
  constexpr int kTileRows = Pass::kTileRows;
  auto& shared = shared_memory<typename Pass::Memory>();
  const int64_t blocks = ceil_div(call.sizes.seqlen_k, kBlockK), head = blockIdx.x / blocks;
  const int64_t b = head / call.sizes.heads_kv, h_kv = head % call.sizes.heads_kv;
  const int64_t j0 = blockIdx.x % blocks * kBlockK;
  const typename Pass::Params p = of_sequence(call, b);
  const Sizes& z = p.sizes;
  if (j0 >= z.seqlen_k) return;  // the sequence ends before these keys
  const int64_t first_col = int64_t{blockIdx.y} * kSlice, columns = kIsDk ? z.head_dim : z.head_dim_v;
  const int64_t group = z.heads / z.heads_kv;
  const PhiloxKey key = dropout_key(p.dropout);

  T grad[kBlockK / kSide][kSlice / kSide] = {};
  const Range seen = visible_queries(p.band, j0, smaller<int64_t>(j0 + kBlockK, z.seqlen_k), z.seqlen_q);
  for (int64_t h = h_kv * group; h < (h_kv + 1) * group; ++h)
    for (int64_t i0 = seen.begin / kTileRows * kTileRows; i0 < seen.end; i0 += kTileRows) {
      const TilePosition at{b, h, i0, j0};
      if constexpr (Pass::kHasFunctions) {
        if (Pass::is_hidden(p, w, at)) continue;
      }
      const bool partial = Pass::kHasFunctions || is_partial(p, at, kTileRows);
      Pass::template recompute<kIsDk>(p, w, key, shared, at, [&](int row, int col, const auto& element) {
        if constexpr (kIsDk) {
          Pass::store_weights(shared, row, col, element);
        } else {
          shared.weights[row][col] = weight_of(element.prob, element.attends);
        }
      });
      if constexpr (kIsDk) {
        Pass::add_to_dk(p, shared, at, first_col, partial, grad);
      } else {
        add_weighted_rows<true>(shared, shared.weights,
                                rows_from<In>(p.dout, b, h, i0, z.seqlen_q, kTileRows), first_col, columns,
                                partial, grad);
      }
    }
  store_gradient<In>(kIsDk ? p.dk : p.dv, b, h_kv, j0, z.seqlen_k, first_col, columns, grad);
}

}  // namespace flash_attn_ext::cuda::simt
