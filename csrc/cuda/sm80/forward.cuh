// Forward on tensor cores: FlashAttention-2, algorithm 1. A block owns 128 query rows of a head, a warp 16 of
// them. cp.async loads K and V while the products of other tiles run.
#pragma once

#include <algorithm>

#include "../../core/splits.h"
#include "../launch.h"
#include "../shared_memory.h"
#include "sm80.h"
#include "softmax.cuh"

namespace flash_attn_ext::cuda::sm80 {

template <class In_, int kHeadDim_, int kBlockK_, int kBuffers_>
struct Config {
  using In = In_;
  static constexpr int kHeadDim = kHeadDim_;  // of q, k, v and out; smaller ones are padded with zeros
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kBlockQ = 16 * kWarps, kBlockK = kBlockK_;
  static constexpr int kBuffers = kBuffers_;  // of K, and as many of V
};

template <class C>
struct SharedMemory {
  Tile<typename C::In, C::kBlockQ, C::kHeadDim> q;
  Tile<typename C::In, C::kBlockK, C::kHeadDim> k[C::kBuffers], v[C::kBuffers];
  int row_is_finite[C::kBlockK];  // of v, where take_out_non_finite_rows() looked
};

// Where a thread's elements of the block's scores lie: element e of accumulator n.
struct Place {
  const Sizes& sizes;
  int64_t b, h, i0, j0;

  __device__ int64_t batch() const { return b; }
  __device__ int64_t head(int) const { return h; }
  __device__ int64_t query(int e) const { return i0 + 16 * warp() + lane() / 4 + e / 2 * 8; }
  __device__ int64_t key(int n, int e) const { return j0 + 8 * n + lane() % 4 * 2 + e % 2; }
  __device__ bool inside(int n, int e) const {
    return query(e) < sizes.seqlen_q && key(n, e) < sizes.seqlen_k;
  }
};

// Drops elements of P; the kept ones are scaled at the end, in fp32. One Philox call is enough for a thread's
// four elements of an accumulator: core/philox.h assigns its four words so.
template <int N>
__device__ void drop_probs(const AttentionParams& p, PhiloxKey key, const Place& at, int64_t head_index,
                           float (&probs)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const PhiloxWords words = dropout_words(key, head_index, at.query(0), at.key(n, 0));
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (words.w[e] < p.dropout.threshold) probs[n][e] = 0;
  }
}

// Whether some element of the tile is Inf or NaN. All threads of the block look, each at its share.
template <class C, class ValueTile>
__device__ bool has_non_finite(const ValueTile& tile) {
  bool found = false;
  for (int e = threadIdx.x; e < C::kBlockK * C::kHeadDim; e += C::kThreads)
    found |= !std::isfinite(widen(tile.elements[e]));
  return __syncthreads_or(found);  // one answer for all, or the warps would part
}

// For the block: finds the value rows with Inf or NaN, adds them by add_non_finite_rows(), and sets them to
// zero.
template <class C>
__device__ void take_out_non_finite_rows(const float (&probs)[C::kBlockK / 8][4], uint32_t attends,
                                         SharedMemory<C>& shared, int buffer,
                                         float (&acc)[C::kHeadDim / 8][4]) {
  auto& values = shared.v[buffer];
  if (threadIdx.x < C::kBlockK) {
    bool finite = true;
    for (int col = 0; col < C::kHeadDim; ++col) finite &= std::isfinite(widen(values.at(threadIdx.x, col)));
    shared.row_is_finite[threadIdx.x] = finite;
  }
  __syncthreads();  // every row has been judged
  const auto is_finite = [&](int row) { return shared.row_is_finite[row] != 0; };
  add_non_finite_rows(probs, attends, values, is_finite, acc);
  __syncthreads();  // everyone has read the rows
  for (int e = threadIdx.x; e < C::kBlockK * C::kHeadDim; e += C::kThreads)
    if (!shared.row_is_finite[e / C::kHeadDim]) values.elements[e] = round_to<typename C::In>(0.0f);
  __syncthreads();  // they are zeros
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    forward_kernel(const AttentionParams p, int64_t query_blocks) {
  using In = typename C::In;
  auto& shared = shared_memory<SharedMemory<C>>();
  const Sizes& z = p.sizes;

  // What this block owns. Causal: the longest rows of a head first.
  const int64_t head = blockIdx.x / query_blocks, b = head / z.heads, h = head % z.heads, h_kv = z.kv_head(h);
  const int64_t i0 = (query_blocks - 1 - blockIdx.x % query_blocks) * C::kBlockQ;
  const int64_t i_end = smaller<int64_t>(i0 + C::kBlockQ, z.seqlen_q);
  const Range keys = visible_keys(p.band, i0, i_end, z.seqlen_k);
  const int64_t begin = keys.begin / C::kBlockK * C::kBlockK;
  const PhiloxKey key = dropout_key(p.dropout);

  // Two buffers: the next tile's K and V are loaded while this tile's are used. One buffer: V is loaded while
  // K is used, and the next K while V is used.
  constexpr bool kDouble = C::kBuffers == 2;
  constexpr int kLater = kDouble ? 1 : 0;  // the newest groups, which no wait is for yet
  const auto load_k = [&](int64_t j0, int buffer) {
    if (j0 < keys.end)
      shared.k[buffer].template load_async<C::kThreads>(p.k, b, h_kv, j0, z.seqlen_k, z.head_dim);
    ptx::cp_async_commit();  // ends the group of k; an empty one too, because the waits count groups
  };
  const auto load_v = [&](int64_t j0, int buffer) {
    if (j0 < keys.end)
      shared.v[buffer].template load_async<C::kThreads>(p.v, b, h_kv, j0, z.seqlen_k, z.head_dim_v);
    ptx::cp_async_commit();  // ends the group of v
  };

  if (begin < keys.end)  // else nobody waits for q
    shared.q.template load_async<C::kThreads>(p.q, b, h, i0, z.seqlen_q, z.head_dim);
  load_k(begin, 0);  // one group with q
  if (kDouble) load_v(begin, 0);

  const ScoreScale scale(p);
  RowStatistics statistics;
  float out[C::kHeadDim / 8][4] = {};
  int buffer = 0;
  for (int64_t j0 = begin; j0 < keys.end; j0 += C::kBlockK, buffer ^= kDouble) {
    const Place at{z, b, h, i0, j0};
    const int64_t j_end = smaller<int64_t>(j0 + C::kBlockK, z.seqlen_k);
    const bool tail = j_end < j0 + C::kBlockK;
    const bool partial = p.mask || tail || !band_covers(p.band, i0, i_end, j0, j_end);

    ptx::cp_async_wait<kLater>();  // this thread's part of q and k has landed; v may be on its way
    __syncthreads();               // everyone's part has; everyone has read the other k, or, of one, v
    if constexpr (kDouble) {
      load_k(j0 + C::kBlockK, buffer ^ 1);
    } else {
      load_v(j0, 0);
    }

    float scores[C::kBlockK / 8][4] = {};
    multiply_rows(shared.q, shared.k[buffer], scores);
    const uint32_t attends = finish_scores(p, scale, at, partial, scores);
    float factor[2];
    statistics.update(scale, scores, factor);
    if (p.dropout) drop_probs(p, key, at, head, scores);  // after the row sum: it acts on the normalised P
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] *= factor[e / 2];

    ptx::cp_async_wait<kLater>();  // this thread's part of v has landed; the next k may be on its way
    __syncthreads();               // everyone's part has; everyone has read the other v, or, of one, k
    if constexpr (kDouble) {
      load_v(j0 + C::kBlockK, buffer ^ 1);
    } else {
      load_k(j0 + C::kBlockK, 0);
    }
    if (partial && has_non_finite<C>(shared.v[buffer]))
      take_out_non_finite_rows<C>(scores, attends, shared, buffer, out);
    multiply_probs(scores, shared.v[buffer], out);
  }

  const Place at_end{z, b, h, i0, 0};  // of the results: "keys" are their columns
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const RowResult<float> result = finish_row(p, b, h, statistics.max[r] * scale.to_score(),
                                               total_of_lanes<kRowLanes>(statistics.sum[r]));
    const float out_factor =
        result.out_factor * (p.dropout ? static_cast<float>(p.dropout.keep_scale) : 1.0f);
    const int64_t i = at_end.query(2 * r);
    if (i >= z.seqlen_q) continue;
    if (lane() % 4 == 0) static_cast<float*>(p.lse)[p.statistics_row(b, h, i)] = result.lse;
    In* row = p.out.row<In>(b, h, i);
#pragma unroll
    for (int n = 0; n < C::kHeadDim / 8; ++n) {
      const int64_t col = at_end.key(n, 0);
      if (col < z.head_dim_v)
        *reinterpret_cast<uint32_t*>(row + col) =
            ptx::pack<In>(out[n][2 * r] * out_factor, out[n][2 * r + 1] * out_factor);
    }
  }
}

template <class C>
cudaError_t launch_padded(const AttentionParams& p, cudaStream_t stream) {
  const Sizes& z = p.sizes;
  const int64_t query_blocks = ceil_div(z.seqlen_q, C::kBlockQ);
  const LaunchShape shape{z.batch * z.heads * query_blocks, 1, 1, C::kThreads, sizeof(SharedMemory<C>)};
  return launch(forward_kernel<C>, shape, stream, p, query_blocks);
}

// Each needs at most 99 KB, the limit of GPUs of compute capability 8.6 and 8.9. All have 128 queries: K and
// V are read from L2 once for all of them. And of the eight warps two share a scheduler, so that the softmax
// of one runs during the products of the other.
template <class In>
cudaError_t launch_forward(const AttentionParams& p, cudaStream_t stream) {
  const int64_t widest = std::max(p.sizes.head_dim, p.sizes.head_dim_v);
  if (widest <= 64) return launch_padded<Config<In, 64, 64, 2>>(p, stream);    // 48 KB
  if (widest <= 128) return launch_padded<Config<In, 128, 64, 2>>(p, stream);  // 96 KB
  if (widest <= 192) return launch_padded<Config<In, 192, 32, 2>>(p, stream);  // 96 KB: fewer keys
  return launch_padded<Config<In, 256, 32, 1>>(p, stream);                     // 96 KB: and one buffer
}

}  // namespace flash_attn_ext::cuda::sm80
