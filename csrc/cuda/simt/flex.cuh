// Forward with functions of the user and block masks. A block has 64 query rows of a head and a slice of the D_v columns. The
// loop is the loop of forward.cuh without splits of the keys. It skips tiles that the block mask hides.
#pragma once

#include "../shown_tiles.cuh"
#include "backward_tile.cuh"
#include "flex.h"
#include "forward.cuh"
#include "functions.cuh"

namespace flash_attn_ext::cuda::simt {

// Whether the block mask hides a tile of `rows` queries.
__device__ inline bool is_hidden(const AttentionParams& p, const DeviceFunctions& functions,
                                 const TilePosition& at, int rows) {
  if (!functions.blocks) return false;
  const int64_t i_end = smaller<int64_t>(at.i0 + rows, p.sizes.seqlen_q);
  const int64_t j_end = smaller<int64_t>(at.j0 + kBlockK, p.sizes.seqlen_k);
  return states_of_tile(p, functions, at.b, at.h, at.i0, i_end, at.j0, j_end, functions.blocks.queries_before)
      .is_hidden();
}

template <class T>
struct FlexScore : Score<T> {
  T old;  // the score before the user's function
};

// One element of the score matrix, as in ../scores.cuh, with the functions: softcap, ALiBi, the user's function, mask,
// band and block mask. A new score of -inf counts as hidden.
template <class T>
__device__ FlexScore<T> finish_score(const AttentionParams& p, const DeviceFunctions& functions,
                                     const TileChunks& chunks, T product, int64_t b, int64_t h, int64_t i,
                                     int64_t j) {
  const FlexScore<T> masked{{-kInf<T>, T(0), false}, T(0)};
  const bool inside = i < p.sizes.seqlen_q && j < p.sizes.seqlen_k;
  if (!inside || !in_band(p.band.without_chunks(), i, j) || !chunks.same(p.band, i, j)) return masked;
  ProgramPoint<T> point{b, h, first_query_index(p) + i, j, T(0), T(0)};
  if (!is_shown(functions, point, functions.blocks.queries_before)) return masked;
  T score = rounded_product(product, product_scale<T>(p)), t = 0;
  if (has_softcap(p)) {
    t = std::tanh(score);
    score = rounded_product(t, static_cast<T>(p.softcap));
  }
  if (p.alibi) score -= rounded_product(alibi_slope<T>(p.alibi, b, h), alibi_distance<T>(p.band, i, j));
  const T old = point.score = score;
  if (functions.score) score = number_of<T>(run_program(&functions, functions.score, point));
  if (score == -kInf<T>) return masked;
  if (p.mask) {
    const T bias = mask_bias<T>(p.mask, b, h, i, j);
    if (bias == -kInf<T>) return masked;
    score += bias;
  }
  return {{score, t, true}, old};
}

// The scores of the rows of a block. Calls visit(j0, count, attends) for each tile that is not hidden, with the scores in
// `shared.weights`. Bit 4 r + c of `attends`: the thread's element (r, c) attends.
template <class In, class T, class Visit>
__device__ void for_each_tile_of_scores(const AttentionParams& p, const DeviceFunctions& functions,
                                        SharedMemory<T, kBlockQ>& shared, int64_t b, int64_t h, int64_t i0,
                                        const Visit& visit) {
  const Sizes& z = p.sizes;
  const Rows<In> q = rows_from<In>(p.q, b, h, i0, z.seqlen_q);
  const TileChunks chunks(p.band, i0);
  const Range seen = visible_keys(p.band, i0, i0 + q.count, z.seqlen_k);
  for (int64_t j0 = seen.begin / kBlockK * kBlockK; j0 < seen.end; j0 += kBlockK) {
    if (is_hidden(p, functions, {b, h, i0, j0}, kBlockQ)) continue;
    T products[kRows][kCols] = {};
    add_row_products(shared, q, rows_from<In>(p.k, b, z.kv_head(h), j0, z.seqlen_k), z.head_dim, products);
    store_elements(products, shared.weights);
    uint32_t attends = 0;
#pragma unroll 1
    for (int e = 0; e < kRows * kCols; ++e) {
      const int row = tile_row(e / kCols), col = tile_col(e % kCols);
      const FlexScore<T> score =
          finish_score(p, functions, chunks, shared.weights[row][col], b, h, i0 + row, j0 + col);
      shared.weights[row][col] = score.value;
      attends |= uint32_t{score.attends} << e;
    }
    visit(j0, attends);
  }
}

// Recomputes the statistics of the rows, for the backward of rows with an lse that is too large to be exact.
template <class In, class T>
__device__ void add_tiles(const BackwardParams& p, const DeviceFunctions* functions,
                          SharedMemory<T, kBlockQ>& shared, int64_t b, int64_t h, int64_t i0,
                          RowStatistics<T, kRows>& statistics) {
  for_each_tile_of_scores<In>(p, *functions, shared, b, h, i0, [&](int64_t, uint32_t attends) {
    T factor[kRows];
    statistics.update(shared.weights, attends, factor);
  });
}

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1)
    flex_kernel(const AttentionParams call, const DeviceFunctions* functions) {
  constexpr int kSliceCols = kMaxSlice / kSide;
  auto& shared = shared_memory<SharedMemory<T, kBlockQ>>();
  const int64_t blocks = ceil_div(call.sizes.seqlen_q, kBlockQ), head = blockIdx.x / blocks;
  const int64_t b = head / call.sizes.heads, h = head % call.sizes.heads;
  const int64_t i0 = (blocks - 1 - blockIdx.x % blocks) * kBlockQ;  // causal: the longest rows first
  const AttentionParams p = of_sequence(call, b);
  const Sizes& z = p.sizes;
  if (i0 >= z.seqlen_q) return;  // the sequence ends before these rows
  const QueryTile<false> tile{b, h, i0, smaller<int64_t>(z.seqlen_q - i0, kBlockQ), z.seqlen_q};
  const int64_t first_col = int64_t{blockIdx.y} * kMaxSlice;
  const PhiloxKey key = dropout_key(p.dropout);

  RowStatistics<T, kRows> statistics;
  T out[kRows][kSliceCols] = {};
  for_each_tile_of_scores<In>(p, *functions, shared, b, h, i0, [&](int64_t j0, uint32_t attends) {
    T factor[kRows];
    statistics.update(shared.weights, attends, factor);
    if (p.dropout) drop_probs<T, kBlockQ>(p, key, tile, j0, shared.weights);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int c = 0; c < kSliceCols; ++c) out[r][c] *= factor[r];
    add_weighted_rows<false>(shared, shared.weights, rows_from<In>(p.v, b, z.kv_head(h), j0, z.seqlen_k),
                             first_col, z.head_dim_v, true, out);
  });

#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const T sum = row_total(statistics.sum[r]);
    const int64_t i = i0 + tile_row(r);
    if (i >= z.seqlen_q) continue;
    const RowResult<T> result = finish_row(p, b, h, statistics.max[r], sum);
    if (thread_x() == 0 && blockIdx.y == 0) static_cast<T*>(p.lse)[p.lse_index(b, h, i)] = result.lse;
#pragma unroll
    for (int c = 0; c < kSliceCols; ++c) {
      const int64_t col = first_col + tile_col(c);
      if (col < z.head_dim_v) p.out.row<In>(b, h, i)[col] = round_to<In>(out[r][c] * result.out_factor);
    }
  }
}

template <class In, class T = Accumulator<In>>
cudaError_t launch_flex(const AttentionParams& p, void* workspace, cudaStream_t stream) {
  const Sizes& z = p.sizes;
  auto* const functions = static_cast<DeviceFunctions*>(workspace);
  // At least one slice, because a call with D_v 0 has an lse.
  const LaunchShape shape{z.batch * z.heads * ceil_div(z.seqlen_q, kBlockQ),
                          z.head_dim_v > kMaxSlice ? ceil_div(z.head_dim_v, kMaxSlice) : 1, 1, kThreads,
                          sizeof(SharedMemory<T, kBlockQ>)};
  return in_order([&] { return launch_store_functions(p, functions, stream); },
                  [&] { return launch(flex_kernel<In>, shape, stream, p, functions); });
}

}  // namespace flash_attn_ext::cuda::simt
