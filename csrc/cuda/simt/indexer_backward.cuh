// Gradients of the indexer, without atomics: every run gives the same bits. With S[h][j] = scale <q[i][h], k[j]> and the
// gradients dscore[i][j] of the scores:
//
//   dweights[i][h] = sum_j dscore[i][j] relu(S[h][j])
//   G[h][j] = dscore[i][j] weights[i][h] scale, or 0 where S[h][j] <= 0
//   dq[i][h] = sum_j G[h][j] k[j]      dk[j] = sum_i sum_h G[h][j] q[i][h]
//
//   dscores_of_loss_kernel   dscore = dloss (exp(score - index_lse) - T / mass)   one query
//   dscores_by_key_kernel    dscores of chosen keys in the order of sorted lists  one query
//   indexer_dq_kernel        dq and dweights                                      16 heads of one query, and a slice
//   indexer_dk_kernel        dk                                                   one key, and a slice
//
// Without chosen keys the loss has dscores for 128 queries at a time, and dk is the sum of these parts in order.
#pragma once

#include <algorithm>

#include "indexed_backward.cuh"
#include "indexer.cuh"
#include "indexer_workspace.h"

namespace flash_attn_ext::cuda::simt {

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    dscores_of_loss_kernel(const IndexerLossBackwardParams p, const ScoreGradients<T> part, T* dscores) {
  auto& shared = shared_memory<IndexedMemory<T>>();
  const int64_t b = blockIdx.x / part.queries, i = part.first + blockIdx.x % part.queries;
  const RowSlots row(p, p.chosen, b, i);
  T* to = dscores + part.row(b, i);
  const int64_t at = b * p.seqlen_q + i;
  const T dloss = static_cast<const T*>(p.dloss)[at], mass = static_cast<const T*>(p.mass)[at];
  const T lse = static_cast<const T*>(p.index_lse)[at];
  if (mass == T(0) || dloss == T(0)) {  // the row has no gradient, even if an input is NaN
    for (int64_t n = threadIdx.x; n < row.count; n += kThreads) to[row.place(n)] = kMaskedWeight<T>;
    return;
  }
  for (int64_t n0 = 0; n0 < row.count; n0 += kBlockK) {
    const int slots = row.load(p, shared, n0), n = threadIdx.x;
    const T score = index_score<In>(p, shared, b, i, slots), prob = main_probs<In>(p, shared, b, i, slots);
    if (n < slots)
      to[row.place(n0 + n)] = weight_of(dloss * (std::exp(score - lse) - prob / mass), shared.keys[n] >= 0);
  }
}

template <class T>
struct SlotsMemory {
  int32_t numbers[kThreads];
  T dscores[kThreads];
};

// Slots that name the same key are added in order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    dscores_by_key_kernel(const KeyLists lists, const ScoreGradients<T> by_slot, T* by_key) {
  auto& shared = shared_memory<SlotsMemory<T>>();
  const int64_t slots = lists.indices.count, row = int64_t{blockIdx.x} * slots;
  const int32_t length = lists.lengths[blockIdx.x];
  for (int64_t first = 0; first < length; first += kThreads) {
    const int64_t entry = first + threadIdx.x;
    const int32_t number = entry < length ? lists.entries[row + entry] : -1;
    T sum = kMaskedWeight<T>;  // -0 + x is x
    for (int64_t n0 = 0; n0 < slots; n0 += kThreads) {
      const int64_t n = n0 + threadIdx.x;
      __syncthreads();  // all threads have read the last slots
      shared.numbers[threadIdx.x] = n < slots ? static_cast<int32_t>(lists.indices.numbers[row + n]) : -1;
      if (n < slots) shared.dscores[threadIdx.x] = by_slot.rows[row + n];
      __syncthreads();  // publishes the slots
      if (number < 0) continue;
      for (int t = 0; t < kThreads; ++t)
        if (shared.numbers[t] == number) sum += by_slot.of(shared.dscores[t]);
    }
    if (number >= 0) by_key[row + entry] = sum;
  }
}

// G of one head and key. A masked dscore stays masked.
template <class T>
__device__ T product_gradient(const IndexerParams& p, T dscore, T weight, T product) {
  const T g = product <= T(0) ? T(0) : dscore * weight * static_cast<T>(p.scale);
  return weight_of(g, !is_masked_weight(dscore));
}

template <class T>
struct IndexerRowMemory : IndexedMemory<T> {
  T dscores[kBlockK];
};

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    indexer_dq_kernel(const IndexerParams p, const ChosenKeys chosen, const IndexerGradients to,
                      const ScoreGradients<T> dscores) {
  auto& shared = shared_memory<IndexerRowMemory<T>>();
  const int64_t tiles = ceil_div(p.heads, kTileHeads), part_row = blockIdx.x / tiles;
  const int64_t b = part_row / dscores.queries, i = dscores.first + part_row % dscores.queries;
  const HeadTile tile = tile_of_heads(b, 0, i, p.heads, blockIdx.x % tiles * kTileHeads);
  const RowSlots slots_of_row(p, chosen, b, i);
  const T* own = dscores.rows + dscores.row(b, i);
  const int64_t first_col = int64_t{blockIdx.y} * kMaxSlice;
  const int row = tile_row(0);
  const bool exists = row < tile.count;
  const int64_t at = (b * p.seqlen_q + i) * p.heads + tile.head(exists ? row : 0);
  const T weight = static_cast<const T*>(p.weights)[at], scale = static_cast<T>(p.scale);

  T dq[kHeadRows][kMaxSlice / kSide] = {}, dweight = 0;
  for (int64_t n0 = 0; n0 < slots_of_row.count; n0 += kBlockK) {
    const int slots = slots_of_row.load(p, shared, n0), n = threadIdx.x;
    // A thread reads only its own key here. The first barrier of add_row_products() publishes the dscores.
    if (n < kBlockK) {
      shared.dscores[n] =
          shared.keys[n] >= 0 ? dscores.of(own[slots_of_row.place(n0 + n)]) : kMaskedWeight<T>;
    }
    const GatheredRows<In> k(p.k, tile, shared.keys, slots);
    T products[kHeadRows][kCols] = {};
    add_row_products(shared, tile.rows<In>(p.q), k, p.head_dim, products);
#pragma unroll
    for (int c = 0; c < kCols; ++c) {
      const T product = rounded_product(products[0][c], scale), dscore = shared.dscores[tile_col(c)];
      if (!is_masked_weight(dscore)) dweight += dscore * relu(product);
      shared.weights[row][tile_col(c)] =
          exists ? product_gradient(p, dscore, weight, product) : kMaskedWeight<T>;
    }
    add_weighted_rows<false>(shared, shared.weights, k, first_col, p.head_dim, true, dq);
  }
  dweight = row_total(dweight);
  if (!exists) return;
  if (blockIdx.y == 0 && thread_x() == 0) static_cast<T*>(to.dweights)[at] = dweight;
#pragma unroll
  for (int c = 0; c < kMaxSlice / kSide; ++c) {
    const int64_t col = first_col + tile_col(c);
    if (col < p.head_dim) to.dq.row<In>(b, tile.head(row), i)[col] = round_to<In>(dq[0][c]);
  }
}

template <class T>
struct IndexerKeyMemory : KeyMemory<T> {
  T dscores[kThreads];  // of key j and query i0 + n
};

// A thread owns a column of dk. Queries are visited in ascending order, and the heads of a query in order. `sums`: dk
// of the parts before; null if there is one part.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    indexer_dk_kernel(const IndexerParams p, const ChosenKeys chosen, const KeyLists lists,
                      const IndexerGradients to, const ScoreGradients<T> dscores, T* sums) {
  auto& shared = shared_memory<IndexerKeyMemory<T>>();
  const int64_t b = blockIdx.x / p.seqlen_k, j = blockIdx.x % p.seqlen_k;
  const int64_t col = int64_t{blockIdx.y} * kThreads + threadIdx.x, end = dscores.first + dscores.queries;
  const T scale = static_cast<T>(p.scale), *weights = static_cast<const T*>(p.weights);
  const In* k = p.k.row<In>(b, 0, j);
  T* const sum = sums && col < p.head_dim ? sums + int64_t{blockIdx.x} * p.head_dim + col : nullptr;

  T dk = sum && dscores.first > 0 ? *sum : T(0);
  Range seen = visible_queries(p.band_of(b), j, j + 1, p.seqlen_q);
  seen = {seen.begin < dscores.first ? dscores.first : seen.begin, smaller(seen.end, end)};
  if (!p.key_is_visible(b, j)) seen.end = seen.begin;
  for (int64_t i0 = seen.begin; i0 < seen.end; i0 += kThreads) {
    const int64_t own = i0 + threadIdx.x;
    const int64_t place = own >= seen.end ? -1 : chosen ? place_of(lists, b, 0, own, j) : j;
    const T dscore = place >= 0 ? dscores.rows[dscores.row(b, own) + place] : kMaskedWeight<T>;
    shared.dscores[threadIdx.x] = dscore;  // published with the queries
    const int64_t pairs = int64_t{collect_queries(shared, !is_masked_weight(dscore), i0)} * p.heads;
    for (int64_t first = 0; first < pairs; first += kPairs) {
#pragma unroll 1
      for (int n = thread_y(); n < kPairs; n += kSide) {  // 16 threads for each pair
        const int64_t pair = first + n, at = pair < pairs ? pair : first;
        const int64_t i = shared.queries[at / p.heads], h = at % p.heads;
        const In* q = p.q.row<In>(b, h, i);
        T product = 0;
        for (int64_t c = thread_x(); c < p.head_dim; c += kSide) product += widen(q[c]) * widen(k[c]);
        product = row_total(product);
        if (thread_x() == 0)
          shared.dproducts[n] =
              product_gradient(p, shared.dscores[i - i0], weights[(b * p.seqlen_q + i) * p.heads + h],
                               rounded_product(product, scale));
      }
      __syncthreads();  // publishes the gradients of the products
      for (int n = 0; n < kPairs && first + n < pairs && col < p.head_dim; ++n) {
        const int64_t i = shared.queries[(first + n) / p.heads], h = (first + n) % p.heads;
        dk += shared.dproducts[n] * widen(p.q.row<In>(b, h, i)[col]);
      }
      __syncthreads();  // all threads have read the gradients of the products
    }
  }
  if (col >= p.head_dim) return;
  if (end < p.seqlen_q)
    *sum = dk;
  else
    to.dk.row<In>(b, 0, j)[col] = round_to<In>(dk);
}

// Computes the gradients of q, k and weights from the gradients of the scores, for one part of the queries.
template <class In, class T>
cudaError_t launch_indexer_gradients(const IndexerParams& p, const ChosenKeys& chosen,
                                     const IndexerGradients& to, const IndexerBackwardWorkspace<T>& w,
                                     const ScoreGradients<T>& dscores, cudaStream_t stream) {
  const int64_t rows = p.batch * dscores.queries, tiles = ceil_div(p.heads, kTileHeads);
  ScoreGradients<T> by_key = dscores;
  if (chosen) {
    by_key.rows = w.dscores_by_key;
    by_key.has_masked = true;
  }
  return in_order(
      [&] {
        const LaunchShape shape{rows * tiles, ceil_div(p.head_dim, kMaxSlice), 1, kThreads,
                                sizeof(IndexerRowMemory<T>)};
        return launch(indexer_dq_kernel<In>, shape, stream, p, chosen, to, dscores);
      },
      [&] {
        const LaunchShape shape{chosen && chosen.topk > 0 ? rows : 0, 1, 1, kThreads, sizeof(SlotsMemory<T>)};
        return launch(dscores_by_key_kernel<T>, shape, stream, w.lists, dscores, w.dscores_by_key);
      },
      [&] {
        const LaunchShape shape{p.batch * p.seqlen_k, ceil_div(p.head_dim, kThreads), 1, kThreads,
                                sizeof(IndexerKeyMemory<T>)};
        T* const sums = dscores.queries < p.seqlen_q ? w.dk : nullptr;
        return launch(indexer_dk_kernel<In>, shape, stream, p, chosen, w.lists, to, by_key, sums);
      });
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_indexer_scores_backward(const IndexerScoresBackwardParams& p, void* workspace,
                                           cudaStream_t stream) {
  Arena arena(workspace);
  const auto w = IndexerBackwardWorkspace<T>::lay_out(arena, p);
  const ScoreGradients<T> dscores{static_cast<const T*>(p.dscores), p.chosen.topk, 0, p.seqlen_q, false};
  return in_order([&] { return launch_sort(w.lists, stream); },
                  [&] { return launch_indexer_gradients<In>(p, p.chosen, p.gradients, w, dscores, stream); });
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_indexer_loss_backward(const IndexerLossBackwardParams& p, void* workspace,
                                         cudaStream_t stream) {
  Arena arena(workspace);
  const auto w = IndexerBackwardWorkspace<T>::lay_out(arena, p);
  const int64_t stride = p.chosen ? p.chosen.topk : p.seqlen_k;
  cudaError_t status = launch_sort(w.lists, stream);
  for (int64_t first = 0; first < p.seqlen_q && status == cudaSuccess; first += w.queries) {
    const int64_t queries = std::min(w.queries, p.seqlen_q - first);
    const ScoreGradients<T> part{w.dscores, stride, first, queries, true};
    const LaunchShape shape{p.batch * queries, 1, 1, kThreads, sizeof(IndexedMemory<T>)};
    status =
        in_order([&] { return launch(dscores_of_loss_kernel<In>, shape, stream, p, part, w.dscores); },
                 [&] { return launch_indexer_gradients<In>(p, p.chosen, p.gradients, w, part, stream); });
  }
  return status;
}

}  // namespace flash_attn_ext::cuda::simt
