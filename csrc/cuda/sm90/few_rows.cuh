// Few query rows: loads and stores tiles with rows of several heads.
#pragma once

#include "epilogue.cuh"
#include "few_rows.h"
#include "pipeline.cuh"

namespace flash_attn_ext::cuda::sm90 {

// `heads`: the number of the tile of heads in its batch.
__device__ inline TileRows tile_rows(const FewRows& few, const Sizes& z, int h_kv, int heads,
                                     int first_query) {
  const int in_group = (heads - h_kv * few.group_tiles) << few.heads_shift;
  return {few.heads_shift, first_query, static_cast<int>(z.seqlen_q), h_kv * few.group + in_group,
          (h_kv + 1) * few.group};
}

// The key tiles of a split. Splits have equal numbers of tiles; the last splits may have fewer or none.
__device__ inline Range tiles_of_split(const FewRows& few, int tiles, int split) {
  const int each = few.by_splits.quotient(tiles + few.splits - 1), begin = min(split * each, tiles);
  return {begin, min(begin + each, tiles)};
}

// A block of few rows, without its rows: batch, key head, key tiles, split.
struct FewRowsBlock {
  int b, h_kv;
  Range tiles;
  int split;
};

// Calls repair(h, i) for head h and query i of each NaN row, if a hidden element may be the reason.
template <class In, int kHeadDim, class Repair>
__device__ void repair_tile_rows(const AttentionParams& p, const FewRowsBlock& block, const TileRows& rows,
                                 uint32_t nan_rows, const Repair& repair) {
  const Range queries{rows.query(0), min(rows.query(kWarpRows - 1) + 1, rows.end_query)};
  repair_rows<In, kHeadDim>(p, block.b, block.h_kv, queries, block.tiles, nan_rows, [&](int n) {
    if (rows.has(n)) repair(rows.head(n), rows.query(n));
  });
}

// Writes out and lse of the existing rows of a warp's 16 rows.
template <class In, int kHeadDim>
__device__ void finish_tile_rows(const AttentionParams& p, const FewRowsBlock& block, const TileRows& rows,
                                 float scale, const RowStatistics& statistics, float (&o)[kHeadDim / 2]) {
  float factors[2] = {0, 0};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int n = first_row_in_warp() + 8 * r, h = rows.head(n);
    const float sum = total_of_lanes<kRowLanes>(statistics.sum[r]);
    if (!rows.has(n)) continue;
    const RowResult<float> result = finish_fast(p, block.b, h, statistics.max[r] * scale, sum);
    factors[r] = result.out_factor;
    if (first_column_in_eight() == 0)
      static_cast<float*>(p.lse)[p.lse_index(block.b, h, rows.query(n))] = result.lse;
  }
  scale_rows(o, factors);
  const auto address_of = [&](int n, int column) {
    const bool inside = rows.has(n) && column < p.sizes.head_dim_v;
    return inside ? p.out.row<In>(block.b, rows.head(n), rows.query(n)) + column : nullptr;
  };
  store_each_row<In>(address_of, o);
  repair_tile_rows<In, kHeadDim>(p, block, rows, rows_with_nan(o), [&](int h, int i) {
    repair_row<In, kHeadDim, In>(p, block.b, h, i, block.tiles, p.out, [&](float max, float sum) {
      return finish_fast(p, block.b, h, max, sum).out_factor;
    });
  });
}

// Writes the existing rows of a warp's 16 rows, which combine.cu merges.
template <class In, int kHeadDim>
__device__ void store_partials(const AttentionParams& p, const FewRowsBlock& block, const TileRows& rows,
                               float scale, const RowStatistics& statistics, const Partials<float>& partials,
                               const float (&o)[kHeadDim / 2]) {
  const int64_t first = block.split * p.lse_size();
  const Tensor4 out = partials.out_of_split(p, block.split);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int n = first_row_in_warp() + 8 * r, h = rows.head(n), i = rows.query(n);
    const float sum = total_of_lanes<kRowLanes>(statistics.sum[r]);
    if (!rows.has(n)) continue;
    if (first_column_in_eight() == 0) {
      const int64_t at = first + p.lse_index(block.b, h, i);
      partials.row_max[at] = statistics.max[r] * scale;
      partials.row_sum[at] = sum;
    }
    float* to = out.row<float>(block.b, h, i) + first_column_in_eight();
#pragma unroll
    for (int c = 0; c < kHeadDim; c += 8)
      if (c < p.sizes.head_dim_v)
        *reinterpret_cast<float2*>(to + c) = make_float2(o[c / 2 + 2 * r], o[c / 2 + 2 * r + 1]);
  }
  repair_tile_rows<In, kHeadDim>(p, block, rows, rows_with_nan(o), [&](int h, int i) {
    // Relative to the stored maximum, like the other sums.
    const float stored = partials.row_max[first + p.lse_index(block.b, h, i)];
    const float reference = stored == -kInf<float> ? 0.0f : stored;
    repair_row<In, kHeadDim, float>(p, block.b, h, i, block.tiles, out, [&](float max, float) {
      return ptx::exp2_fast((max - reference) * static_cast<float>(kLog2E));
    });
  });
}

}  // namespace flash_attn_ext::cuda::sm90
