// The indexer of sparse attention: scores at chosen keys, and the loss that trains it (core/indexer.h). A block has one
// query row. The rows of its tile are heads, and the columns are 64 keys of the query.
#pragma once

#include "../../core/indexer.h"
#include "indexed.cuh"

namespace flash_attn_ext::cuda::simt {

// The slots of query row i, in tiles of kBlockK: the chosen keys, or else all keys inside the band.
struct RowSlots {
  const ChosenKeys chosen;
  const int32_t* numbers;  // the chosen keys
  Range seen;              // keys inside the band
  int64_t b, count;

  __device__ RowSlots(const IndexerParams& p, const ChosenKeys& chosen, int64_t b, int64_t i)
      : chosen(chosen),
        numbers(chosen.indices + (chosen ? (b * p.seqlen_q + i) * chosen.topk : 0)),
        seen(visible_keys(p.band_of(b), i, i + 1, p.keys_of(b))),
        b(b),
        count(chosen ? chosen.topk : seen.end - seen.begin) {}

  // Returns the index of slot n in a row of dscores. A row has an element for each chosen key, or for each key.
  __device__ int64_t place(int64_t n) const { return chosen ? n : seen.begin + n; }

  // Returns the key of slot n; -1 if there is no key, or if it is hidden.
  __device__ int64_t key(const IndexerParams& p, int64_t n) const {
    const int64_t j = n >= count ? -1 : chosen ? numbers[n] : seen.begin + n;
    return seen.begin <= j && j < seen.end && p.key_is_visible(b, j) ? j : -1;
  }

  // Writes the keys of the tile that begins at slot n0. Returns the number of slots. No barrier is needed before it: a
  // barrier follows all reads of other threads' keys. The first barrier of add_row_products() publishes the keys.
  template <class Memory>
  __device__ int load(const IndexerParams& p, Memory& shared, int64_t n0) const {
    if (threadIdx.x < kBlockK) shared.keys[threadIdx.x] = key(p, n0 + threadIdx.x);
    return static_cast<int>(smaller<int64_t>(count - n0, kBlockK));
  }
};
static_assert(kBlockK <= kThreads);

template <class T>
__device__ T relu(T x) {
  return x < T(0) ? T(0) : x;  // relu(NaN) is NaN
}

// Adds term(h, <query head h, key>) to the sum of each key of the tile, for the heads of `tile` in order. Thread n < 64
// has the sum of key n.
template <class In, class T, class Term>
__device__ void add_over_heads(IndexedMemory<T>& shared, const HeadTile& tile, const Tensor4& queries,
                               const Tensor4& keys, int64_t columns, int slots, const Term& term, T& sum) {
  T products[kHeadRows][kCols] = {};
  add_row_products(shared, tile.rows<In>(queries), GatheredRows<In>(keys, tile, shared.keys, slots), columns,
                   products);
  const int row = tile_row(0);
  if (row < tile.count)
#pragma unroll
    for (int c = 0; c < kCols; ++c) shared.weights[row][tile_col(c)] = term(tile.head(row), products[0][c]);
  __syncthreads();  // publishes the terms
  if (threadIdx.x >= kBlockK) return;
  for (int r = 0; r < tile.count; ++r) sum += shared.weights[r][threadIdx.x];
}

// Returns the tile of heads [first, first + 16) of `heads`, for the query heads of key head h_kv.
__device__ inline HeadTile tile_of_heads(int64_t b, int64_t h_kv, int64_t i, int64_t heads, int64_t first) {
  return {b, h_kv, i, h_kv * heads + first, static_cast<int>(smaller<int64_t>(heads - first, kTileHeads))};
}

// score[j] = sum_h weights[i][h] relu(scale <q[i][h], k[j]>)
template <class In, class T>
__device__ T index_score(const IndexerParams& p, IndexedMemory<T>& shared, int64_t b, int64_t i, int slots) {
  const T* weights = static_cast<const T*>(p.weights) + (b * p.seqlen_q + i) * p.heads;
  const T scale = static_cast<T>(p.scale);
  T score = 0;
  for (int64_t h = 0; h < p.heads; h += kTileHeads)
    add_over_heads<In>(
        shared, tile_of_heads(b, 0, i, p.heads, h), p.q, p.k, p.head_dim, slots,
        [&](int64_t head, T product) { return weights[head] * relu(rounded_product(product, scale)); },
        score);
  return score;
}

// T_j = sum_h exp(main_scale <query[i][h], key[j]> - lse[i][h]): the main attention, summed over the heads.
template <class In, class T>
__device__ T main_probs(const IndexerLossParams& p, IndexedMemory<T>& shared, int64_t b, int64_t i,
                        int slots) {
  const int64_t group = p.main_heads / p.main_heads_kv;
  const T scale = static_cast<T>(p.main_scale);
  const auto prob = [&](int64_t head, T product) {
    const T lse = static_cast<const T*>(p.lse)[(b * p.main_heads + head) * p.seqlen_q + i];
    return std::exp(rounded_product(product, scale) - (lse == -kInf<T> ? kInf<T> : lse));
  };
  T sum = 0;
  for (int64_t h_kv = 0; h_kv < p.main_heads_kv; ++h_kv)
    for (int64_t h = 0; h < group; h += kTileHeads)
      add_over_heads<In>(shared, tile_of_heads(b, h_kv, i, group, h), p.query, p.key, p.main_head_dim, slots,
                         prob, sum);
  return sum;
}

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1) indexer_scores_kernel(const IndexerScoresParams p) {
  auto& shared = shared_memory<IndexedMemory<T>>();
  const int64_t b = blockIdx.x / p.seqlen_q, i = blockIdx.x % p.seqlen_q;
  const RowSlots row(p, p.chosen, b, i);
  T* scores = static_cast<T*>(p.scores) + int64_t{blockIdx.x} * p.chosen.topk;
  for (int64_t n0 = 0; n0 < row.count; n0 += kBlockK) {
    const int slots = row.load(p, shared, n0), n = threadIdx.x;
    const T score = index_score<In>(p, shared, b, i, slots);
    if (n < slots) scores[n0 + n] = shared.keys[n] >= 0 ? score : -kInf<T>;
  }
}

// The sums of one query's loss, over some of its keys. indexer_loss-inl.h has the formula.
template <class T>
struct LossSums {
  T max, sum;                 // of exp(score - max)
  T mass, entropy, weighted;  // of T, T log T, T score

  static __device__ LossSums none() { return {-kInf<T>, T(0), T(0), T(0), T(0)}; }
  static __device__ LossSums of_key(T score, T prob) {
    const bool is_zero = prob == T(0);
    return {score, T(1), prob, is_zero ? T(0) : prob * std::log(prob), is_zero ? T(0) : prob * score};
  }

  __device__ void add(const LossSums& other) {
    const T new_max = larger(max, other.max), reference = new_max == -kInf<T> ? T(0) : new_max;
    sum = sum * std::exp(max - reference) + other.sum * std::exp(other.max - reference);
    max = new_max;
    mass += other.mass;
    entropy += other.entropy;
    weighted += other.weighted;
  }
};

template <class T>
struct LossMemory : IndexedMemory<T> {
  LossSums<T> sums[kBlockK];
};

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1) indexer_loss_kernel(const IndexerLossParams p) {
  auto& shared = shared_memory<LossMemory<T>>();
  const int64_t b = blockIdx.x / p.seqlen_q, i = blockIdx.x % p.seqlen_q;
  const RowSlots row(p, p.chosen, b, i);
  const int n = threadIdx.x;
  LossSums<T> sums = LossSums<T>::none();
  for (int64_t n0 = 0; n0 < row.count; n0 += kBlockK) {
    const int slots = row.load(p, shared, n0);
    const T score = index_score<In>(p, shared, b, i, slots), prob = main_probs<In>(p, shared, b, i, slots);
    if (n < slots && shared.keys[n] >= 0) sums.add(LossSums<T>::of_key(score, prob));
  }
  if (n < kBlockK) shared.sums[n] = sums;
  __syncthreads();  // publishes the sums
  if (n != 0) return;
  for (int other = 1; other < kBlockK; ++other) sums.add(shared.sums[other]);
  const T lse = sums.sum == T(0) ? -kInf<T> : sums.max + std::log(sums.sum);
  static_cast<T*>(p.index_lse)[blockIdx.x] = lse;
  static_cast<T*>(p.mass)[blockIdx.x] = sums.mass;
  static_cast<T*>(p.loss)[blockIdx.x] =
      sums.mass == T(0) ? T(0) : (sums.entropy - sums.weighted) / sums.mass - std::log(sums.mass) + lse;
}

template <class In>
cudaError_t launch_indexer_scores(const IndexerScoresParams& p, cudaStream_t stream) {
  const LaunchShape shape{p.batch * p.seqlen_q, 1, 1, kThreads, sizeof(IndexedMemory<Accumulator<In>>)};
  return launch(indexer_scores_kernel<In>, shape, stream, p);
}

template <class In>
cudaError_t launch_indexer_loss(const IndexerLossParams& p, cudaStream_t stream) {
  const LaunchShape shape{p.batch * p.seqlen_q, 1, 1, kThreads, sizeof(LossMemory<Accumulator<In>>)};
  return launch(indexer_loss_kernel<In>, shape, stream, p);
}

}  // namespace flash_attn_ext::cuda::simt
