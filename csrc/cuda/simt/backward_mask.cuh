// Gradient of a float mask, in the mask's own broadcast shape: dmask = sum of dS over what the mask was
// broadcast.
//
// A block owns a tile of the mask's elements and adds the batches, heads and tiles that share it, in a fixed
// order. Nothing of size S_q x S_k is stored that the mask itself is not.
#pragma once

#include "backward_tile.cuh"

namespace flash_attn_ext::cuda::simt {

// Writes the tile (row block `mi`, column block `mj`) of mask gradient (mb, mh); a mask
// that is broadcast along rows or columns takes their sum.
template <class Out, class T>
__device__ void store_mask_tile(const MaskGrad& g, const ScoreTile<T, kBlockQ>& tile, int64_t mb, int64_t mh,
                                int64_t mi, int64_t mj) {
  const int rows = g.rows == 1 ? 1 : smaller<int64_t>(kBlockQ, g.rows - mi);
  const int cols = g.cols == 1 ? 1 : smaller<int64_t>(kBlockK, g.cols - mj);
  const int summed_rows = g.rows == 1 ? kBlockQ : 1, summed_cols = g.cols == 1 ? kBlockK : 1;
  for (int e = threadIdx.x; e < rows * cols; e += kThreads) {
    const int row = e / cols, col = e % cols;
    T total = 0;
    for (int r = 0; r < summed_rows; ++r)
      for (int c = 0; c < summed_cols; ++c) total += tile[row + r][col + c];
    static_cast<Out*>(g.data)[((mb * g.heads + mh) * g.rows + mi + row) * g.cols + mj + col] =
        round_to<Out>(total);
  }
}

template <class In, class T = Accumulator<In>>
__global__ void __launch_bounds__(kThreads, 1) dmask_kernel(const BackwardParams p, const RowTerms<T> terms) {
  auto& shared = shared_memory<BackwardMemory<T>>();
  const Sizes& z = p.sizes;
  const MaskGrad& g = p.dmask;
  const int64_t row_blocks = ceil_div(g.rows, kBlockQ), col_blocks = ceil_div(g.cols, kBlockK);
  const int64_t mj = blockIdx.x % col_blocks * kBlockK, mi = blockIdx.x / col_blocks % row_blocks * kBlockQ;
  const int64_t head = blockIdx.x / (col_blocks * row_blocks), mh = head % g.heads, mb = head / g.heads;
  const PhiloxKey key = dropout_key(p.dropout);

  // What shares this tile: one block where the mask has the dimension, everything where it is broadcast.
  const Range batches = g.batch == 1 ? Range{0, z.batch} : Range{mb, mb + 1};
  const Range heads = g.heads == 1 ? Range{0, z.heads} : Range{mh, mh + 1};
  const Range queries =
      g.rows == 1 ? Range{0, z.seqlen_q} : Range{mi, smaller<int64_t>(mi + kBlockQ, z.seqlen_q)};
  const Range keys =
      g.cols == 1 ? Range{0, z.seqlen_k} : Range{mj, smaller<int64_t>(mj + kBlockK, z.seqlen_k)};

  T dmask[kRows][kCols] = {};
  for (int64_t b = batches.begin; b < batches.end; ++b)
    for (int64_t h = heads.begin; h < heads.end; ++h)
      for (int64_t i0 = queries.begin; i0 < queries.end; i0 += kBlockQ) {
        const int64_t i_end = smaller<int64_t>(i0 + kBlockQ, z.seqlen_q);
        for (int64_t j0 = keys.begin; j0 < keys.end; j0 += kBlockK) {
          const Range seen = visible_keys(p.band, i0, i_end, z.seqlen_k);
          if (j0 >= seen.end || j0 + kBlockK <= seen.begin) continue;
          recompute_tile<true, In>(p, terms, key, shared, {b, h, i0, j0},
                                   [&](int row, int col, const Element<T>& element) {
                                     shared.weights[row][col] = element.dscore;
                                   });
#pragma unroll
          for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int c = 0; c < kCols; ++c) dmask[r][c] += shared.weights[tile_row(r)][tile_col(c)];
        }
      }

  store_elements(dmask, shared.weights);
  __syncthreads();  // the tile is complete
  switch (p.mask.dtype) {
    case DType::kFloat32: return store_mask_tile<float>(g, shared.weights, mb, mh, mi, mj);
    case DType::kFloat64: return store_mask_tile<double>(g, shared.weights, mb, mh, mi, mj);
    case DType::kBFloat16: return store_mask_tile<__nv_bfloat16>(g, shared.weights, mb, mh, mi, mj);
    case DType::kFloat16: return store_mask_tile<__half>(g, shared.weights, mb, mh, mi, mj);
    case DType::kBool: return;  // has no gradient: checked in ops/checks.cpp
  }
}

}  // namespace flash_attn_ext::cuda::simt
