// Backward of attention by index, without atomics: every run gives the same bits.
//
//   indexed_rows_kernel  delta, and the terms from which P is recomputed   a block has heads of one query row
//   indexed_dq_kernel    dQ += dS K, and parts of dslopes                  the same, and a slice of the D columns
//   indexed_dkv_kernel   dV += P^T dO and dK += dS^T Q                     one key of a key head, and a slice
#pragma once

#include "../sink.cuh"
#include "backward.cuh"
#include "indexed.cuh"

namespace flash_attn_ext::cuda::simt {

// Computes the row's maximum and sum again, as recompute_row_sums() of the dense backward.
template <class In, class T>
__device__ RowSum<T> recompute_indexed_sum(const IndexedBackwardParams& p, const KeyLists& lists,
                                           IndexedMemory<T>& shared, const HeadTile& tile) {
  const NamedKeys named(lists, tile.b, tile.h_kv, tile.i);
  RowStatistics<T, kHeadRows> statistics;
  for (int64_t n0 = 0; n0 < named.count; n0 += kBlockK) {
    const int count = named.load(shared, n0, p.sizes.seqlen_k);
    T products[kHeadRows][kCols] = {}, factor[kHeadRows];
    add_row_products(shared, tile.rows<In>(p.q), GatheredRows<In>(p.k, tile, shared.keys, count),
                     p.sizes.head_dim, products);
    store_elements(products, shared.weights);
    statistics.update(shared.weights, finish_gathered_scores<T>(p, tile, shared), factor);
  }
  const T sum = row_total(statistics.sum[0]);
  const int row = tile_row(0);
  return add_sink(p, tile.b, tile.head(row < tile.count ? row : 0), RowSum<T>{statistics.max[0], sum});
}

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    indexed_rows_kernel(const IndexedBackwardParams p, const IndexedBackwardWorkspace<T> w) {
  auto& shared = shared_memory<IndexedMemory<T>>();
  const HeadTile tile = HeadTile::of_block(p.sizes);
  const int row = tile_row(0);
  const bool exists = row < tile.count;
  const int64_t h = tile.head(exists ? row : 0), at = p.lse_index(tile.b, h, tile.i);
  const T lse = static_cast<const T*>(p.lse)[at];
  const In *dout = p.dout.row<In>(tile.b, h, tile.i), *out = p.out.row<In>(tile.b, h, tile.i);
  T dot = 0;
  for (int64_t c = thread_x(); c < p.sizes.head_dim_v; c += kSide) dot += widen(dout[c]) * widen(out[c]);
  dot = row_total(dot);
  const bool writes = exists && thread_x() == 0;
  if (writes) {
    w.rows.delta[at] = dot - (p.dlse ? static_cast<const T*>(p.dlse)[at] : T(0));
    // +inf gives a row with all keys hidden P = 0 without Inf - Inf.
    w.rows.reference[at] = lse == -kInf<T> ? kInf<T> : lse;
    w.rows.correction[at] = T(0);
  }
  const bool some_inexact = __syncthreads_or(!lse_is_exact(lse));  // all threads branch alike
  if (!some_inexact) return;
  const RowSum<T> sum = recompute_indexed_sum<In>(p, w.lists, shared, tile);
  if (!writes || lse_is_exact(lse)) return;
  w.rows.reference[at] = sum.max;
  w.rows.correction[at] = std::log(sum.sum);
}

template <class T>
struct IndexedBackwardMemory : IndexedMemory<T> {
  ScoreTile<T, kTileHeads> dprobs;
};

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    indexed_dq_kernel(const IndexedBackwardParams p, const IndexedBackwardWorkspace<T> w) {
  auto& shared = shared_memory<IndexedBackwardMemory<T>>();
  const Sizes& z = p.sizes;
  const HeadTile tile = HeadTile::of_block(z);
  const NamedKeys named(w.lists, tile.b, tile.h_kv, tile.i);
  const int64_t first_col = int64_t{blockIdx.y} * kMaxSlice;
  const PhiloxKey key_of_dropout = dropout_key(p.dropout);

  T dq[kHeadRows][kMaxSlice / kSide] = {}, dslope = 0;
  for (int64_t n0 = 0; n0 < named.count; n0 += kBlockK) {
    const int count = named.load(shared, n0, z.seqlen_k);
    const GatheredRows<In> k(p.k, tile, shared.keys, count), v(p.v, tile, shared.keys, count);
    T products[kHeadRows][kCols] = {}, dprobs[kHeadRows][kCols] = {};
    add_row_products(shared, tile.rows<In>(p.q), k, z.head_dim, products);
    store_elements(products, shared.weights);
    add_row_products(shared, tile.rows<In>(p.dout), v, z.head_dim_v, dprobs);
    store_elements(dprobs, shared.dprobs);
    const TileChunks chunks(p.band, tile.i);
#pragma unroll 1
    for (int c = 0; c < kCols; ++c) {
      const int row = tile_row(0), col = tile_col(c);
      const int64_t key = row < tile.count && shared.keys[col] >= 0 ? shared.keys[col] : z.seqlen_k;
      const Element<T> element =
          BackwardPass<In>::element(p, w, key_of_dropout, {tile.b, tile.head(row), tile.i, key}, chunks, 0, 0,
                                    shared.weights[row][col], shared.dprobs[row][col]);
      shared.weights[row][col] = weight_of(element.dproduct, element.attends);
      if (p.dalibi_slopes) dslope -= element.dscore * alibi_distance<T>(p.band, tile.i, key);
    }
    if (p.dq) add_weighted_rows<false>(shared, shared.weights, k, first_col, z.head_dim, true, dq);
  }
  const int row = tile_row(0);
  dslope = row_total(dslope);
  if (row >= tile.count) return;
  const int64_t h = tile.head(row);
  if (p.dalibi_slopes && blockIdx.y == 0 && thread_x() == 0)
    w.dslopes[p.lse_index(tile.b, h, tile.i)] = dslope;
  if (!p.dq) return;
#pragma unroll
  for (int c = 0; c < kMaxSlice / kSide; ++c) {
    const int64_t col = first_col + tile_col(c);
    if (col < z.head_dim) p.dq.row<In>(tile.b, h, tile.i)[col] = round_to<In>(dq[0][c]);
  }
}

constexpr int kPairs = 64;  // pairs (query, head) in shared memory at a time

template <class T>
struct KeyMemory {
  int32_t queries[kThreads];  // queries that list the key, ascending
  uint32_t votes[kThreads / 32];
  T probs[kPairs], dproducts[kPairs];
};

// Returns the index of `number` in the sorted list of query row i; -1 if the list does not contain it.
__device__ inline int64_t place_of(const KeyLists& lists, int64_t b, int64_t h_kv, int64_t i,
                                   int64_t number) {
  if (lists.indices.count == 0) return -1;
  const int64_t at = lists.indices.row(b, h_kv, i);
  const int32_t *list = lists.entries + at, *end = list + lists.lengths[at / lists.indices.count];
  const int32_t *low = list, *high = end;
  while (low < high) {
    const int32_t* middle = low + (high - low) / 2;
    if (*middle < number)
      low = middle + 1;
    else
      high = middle;
  }
  return low < end && *low == number ? low - list : -1;
}

// Collects the queries of [i0, i0 + kThreads) that list the key. Returns their number.
template <class T>
__device__ int collect_queries(KeyMemory<T>& shared, bool found, int64_t i0) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t votes = __ballot_sync(0xffffffffu, found);
  if (lane == 0)
    shared.votes[warp] = votes;  // the last votes were read before the last queries were published
  __syncthreads();               // publishes the votes; all threads have read the last queries
  int before = 0, all = 0;
  for (int n = 0; n < kThreads / 32; ++n) {
    const uint32_t earlier = n < warp ? ~0u : n == warp ? (1u << lane) - 1 : 0u;
    before += __popc(shared.votes[n] & earlier);
    all += __popc(shared.votes[n]);
  }
  if (found) shared.queries[before] = static_cast<int32_t>(i0 + threadIdx.x);
  __syncthreads();  // publishes the queries
  return all;
}

// A thread owns a column of dK and of dV. Queries are visited in ascending order, and the heads of a query in order.
template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    indexed_dkv_kernel(const IndexedBackwardParams p, const IndexedBackwardWorkspace<T> w) {
  auto& shared = shared_memory<KeyMemory<T>>();
  const Sizes& z = p.sizes;
  const int64_t head = blockIdx.x / z.seqlen_k, j = blockIdx.x % z.seqlen_k;
  const int64_t b = head / z.heads_kv, h_kv = head % z.heads_kv, group = z.heads / z.heads_kv;
  const int64_t col = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  const In *k = p.k.row<In>(b, h_kv, j), *v = p.v.row<In>(b, h_kv, j);
  const PhiloxKey key_of_dropout = dropout_key(p.dropout);

  T dk = 0, dv = 0;
  const Range seen = visible_queries(p.band, j, j + 1, z.seqlen_q);
  for (int64_t i0 = seen.begin; i0 < seen.end; i0 += kThreads) {
    const int64_t own = i0 + threadIdx.x;
    const bool found = own < seen.end && place_of(w.lists, b, h_kv, own, j / w.lists.indices.block_size) >= 0;
    const int64_t pairs = collect_queries(shared, found, i0) * group;
    for (int64_t first = 0; first < pairs; first += kPairs) {
#pragma unroll 1
      for (int n = thread_y(); n < kPairs; n += kSide) {  // 16 threads for each pair
        const int64_t pair = first + n, at = pair < pairs ? pair : first;
        const int64_t i = shared.queries[at / group], h = h_kv * group + at % group;
        const In *q = p.q.row<In>(b, h, i), *dout = p.dout.row<In>(b, h, i);
        T product = 0, dprob = 0;
        for (int64_t c = thread_x(); c < z.head_dim; c += kSide) product += widen(q[c]) * widen(k[c]);
        for (int64_t c = thread_x(); c < z.head_dim_v; c += kSide) dprob += widen(dout[c]) * widen(v[c]);
        product = row_total(product);
        dprob = row_total(dprob);
        if (thread_x() == 0) {
          const Element<T> element = BackwardPass<In>::element(p, w, key_of_dropout, {b, h, i, j},
                                                               TileChunks(p.band, i), 0, 0, product, dprob);
          shared.probs[n] = weight_of(element.prob, element.attends);
          shared.dproducts[n] = weight_of(element.dproduct, element.attends);
        }
      }
      __syncthreads();  // publishes the weights
      for (int n = 0; n < kPairs && first + n < pairs; ++n) {
        if (is_masked_weight(shared.probs[n])) continue;
        const int64_t i = shared.queries[(first + n) / group], h = h_kv * group + (first + n) % group;
        if (col < z.head_dim) dk += shared.dproducts[n] * widen(p.q.row<In>(b, h, i)[col]);
        if (col < z.head_dim_v) dv += shared.probs[n] * widen(p.dout.row<In>(b, h, i)[col]);
      }
      __syncthreads();  // all threads have read the weights
    }
  }
  if (p.dk && col < z.head_dim) p.dk.row<In>(b, h_kv, j)[col] = round_to<In>(dk);
  if (p.dv && col < z.head_dim_v) p.dv.row<In>(b, h_kv, j)[col] = round_to<In>(dv);
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_indexed_backward(const IndexedBackwardParams& p, void* workspace, cudaStream_t stream) {
  Arena arena(workspace);
  const auto w = IndexedBackwardWorkspace<T>::lay_out(arena, p);
  const Sizes& z = p.sizes;
  const int64_t blocks = HeadTile::blocks(z), heads = z.batch * z.heads;
  const int64_t columns = z.head_dim > z.head_dim_v ? z.head_dim : z.head_dim_v;
  const int64_t slices = p.dq && z.head_dim > kMaxSlice ? ceil_div(z.head_dim, kMaxSlice) : 1;
  return in_order([&] { return launch_sort(w.lists, stream); },
                  [&] {
                    const LaunchShape shape{blocks, 1, 1, kThreads, sizeof(IndexedMemory<T>)};
                    return launch(indexed_rows_kernel<In>, shape, stream, p, w);
                  },
                  [&] {
                    const LaunchShape shape{p.dq || p.dalibi_slopes ? blocks : 0, slices, 1, kThreads,
                                            sizeof(IndexedBackwardMemory<T>)};
                    return launch(indexed_dq_kernel<In>, shape, stream, p, w);
                  },
                  [&] {
                    const LaunchShape shape{p.dk || p.dv ? z.batch * z.heads_kv * z.seqlen_k : 0,
                                            ceil_div(columns, kThreads), 1, kThreads, sizeof(KeyMemory<T>)};
                    return launch(indexed_dkv_kernel<In>, shape, stream, p, w);
                  },
                  [&] {
                    const LaunchShape shape{p.dalibi_slopes ? ceil_div(heads, kThreads) : 0, 1, 1, kThreads};
                    return launch(dslopes_kernel<T>, shape, stream, static_cast<T*>(p.dalibi_slopes), heads,
                                  w.dslopes, z.seqlen_q);
                  },
                  [&] { return launch_sink_gradient(p, w.rows.delta, RowOfLse{}, stream); });
}

}  // namespace flash_attn_ext::cuda::simt
