// Gradient of a float mask, in the mask's own broadcast shape: the sum of dS over the broadcast dimensions.
//
// A block computes a tile of the mask's elements, or a part of its sum. It adds dS of all batches, heads and score
// tiles that share the mask tile, in a fixed order. No S_q x S_k tensor is stored, unless the mask has this shape.
#pragma once

#include "backward_tile.cuh"

namespace flash_attn_ext::cuda::simt {

// Calls body(zero of the mask's type).
template <class Body>
__device__ void for_mask_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32: return body(float{});
    case DType::kFloat64: return body(double{});
    case DType::kBFloat16: return body(__nv_bfloat16{});
    case DType::kFloat16: return body(__half{});
    case DType::kBool: return;  // has no gradient: checked in ops/checks/check_tensors.cpp
  }
}

// Writes the tile at (mi, mj) of mask gradient (mb, mh), as far as it is before row `end`. If the mask is broadcast
// along rows or columns, writes the sum over them.
template <class Out, class T, int kTileRows>
__device__ void store_mask_tile(const MaskGrad& g, const T (&tile)[kTileRows][kBlockK + 1], int64_t mb,
                                int64_t mh, int64_t mi, int64_t mj, int64_t end) {
  const int rows = g.rows == 1 ? 1 : smaller<int64_t>(kTileRows, end - mi);
  const int cols = g.cols == 1 ? 1 : smaller<int64_t>(kBlockK, g.cols - mj);
  const int summed_rows = g.rows == 1 ? kTileRows : 1, summed_cols = g.cols == 1 ? kBlockK : 1;
  for (int e = threadIdx.x; e < rows * cols; e += kThreads) {
    const int row = e / cols, col = e % cols;
    T total = 0;
    for (int r = 0; r < summed_rows; ++r)
      for (int c = 0; c < summed_cols; ++c) total += tile[row + r][col + c];
    static_cast<Out*>(g.data)[((mb * g.heads + mh) * g.rows + mi + row) * g.cols + mj + col] =
        round_to<Out>(total);
  }
}

template <class Pass, class T = typename Pass::T>
__global__ void __launch_bounds__(kThreads, 1)
    dmask_kernel(const typename Pass::Params call, const typename Pass::Workspace w) {
  constexpr int kTileRows = Pass::kTileRows;
  auto& shared = shared_memory<typename Pass::Memory>();
  const MaskGrad& g = call.dmask;
  const MaskSchedule schedule = schedule_mask(call, kTileRows);
  const int64_t mj = blockIdx.x % schedule.col_blocks * kBlockK;
  const int64_t mi = blockIdx.x / schedule.col_blocks % schedule.row_blocks * kTileRows;
  const int64_t head = blockIdx.x / (schedule.col_blocks * schedule.row_blocks), mh = head % g.heads;
  const int64_t first_batch = head / g.heads, mb = schedule.by_row ? 0 : first_batch;
  Range rows{0, g.rows};  // the rows of the mask that contain this tile
  if (schedule.by_row) {
    const typename Pass::Params own = of_sequence(call, first_batch);
    rows = {own.varlen.first_q, own.varlen.first_q + own.sizes.seqlen_q};
    if (rows.begin + mi >= rows.end) return;  // the sequence ends before these rows
  }
  const PhiloxKey key = dropout_key(call.dropout);

  const int64_t tiles = schedule.batches * schedule.heads * schedule.query_blocks * schedule.key_blocks;
  const int64_t first = blockIdx.z * schedule.tiles_per_part;
  const int64_t end = smaller<int64_t>(first + schedule.tiles_per_part, tiles);
  T dmask[kTileRows / kSide][kCols] = {};
  for (int64_t n = first; n < end; ++n) {
    // first_batch, mh, mi and mj are 0 where the mask is broadcast.
    const int64_t row = n / schedule.key_blocks, shared_head = row / schedule.query_blocks;
    const int64_t b = first_batch + shared_head / schedule.heads, h = mh + shared_head % schedule.heads;
    const int64_t i0 = mi + row % schedule.query_blocks * kTileRows,
                  j0 = mj + n % schedule.key_blocks * kBlockK;
    const typename Pass::Params p = of_sequence(call, b);
    const Sizes& z = p.sizes;
    if (i0 >= z.seqlen_q) continue;  // the sequence ends before these rows
    const Range seen = visible_keys(p.band, i0, smaller<int64_t>(i0 + kTileRows, z.seqlen_q), z.seqlen_k);
    if (j0 >= seen.end || j0 + kBlockK <= seen.begin) continue;
    if constexpr (Pass::kHasFunctions) {
      if (Pass::is_hidden(p, w, {b, h, i0, j0})) continue;
    }
    Pass::template recompute<true>(
        p, w, key, shared, {b, h, i0, j0},
        [&](int row, int col, const auto& element) { shared.weights[row][col] = element.dmask(); });
#pragma unroll
    for (int r = 0; r < kTileRows / kSide; ++r)
#pragma unroll
      for (int c = 0; c < kCols; ++c) dmask[r][c] += shared.weights[tile_row(r)][tile_col(c)];
  }

  store_elements(dmask, shared.weights);
  __syncthreads();  // publishes the tile to all threads
  if (schedule.parts > 1) {
    MaskGrad part = g;
    part.data = w.dmask_parts + blockIdx.z * (g.batch * g.heads * g.rows * g.cols);
    return store_mask_tile<T>(part, shared.weights, mb, mh, mi, mj, rows.end);
  }
  for_mask_type(call.mask.dtype, [&](auto out) {
    store_mask_tile<decltype(out)>(g, shared.weights, mb, mh, rows.begin + mi, mj, rows.end);
  });
}

// Adds the parts in order. A thread computes an element of the mask.
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    dmask_sum_kernel(const MaskGrad g, DType dtype, const T* dmask_parts, int64_t parts) {
  const int64_t element = int64_t{blockIdx.x} * kThreads + threadIdx.x,
                elements = g.batch * g.heads * g.rows * g.cols;
  if (element >= elements) return;
  T total = 0;
  for (int64_t n = 0; n < parts; ++n) total += dmask_parts[n * elements + element];
  for_mask_type(dtype, [&](auto out) {
    using Out = decltype(out);
    static_cast<Out*>(g.data)[element] = round_to<Out>(total);
  });
}

}  // namespace flash_attn_ext::cuda::simt
