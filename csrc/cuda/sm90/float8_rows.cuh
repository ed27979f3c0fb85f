// The rows of a call with float8 products. Copies queries to shared memory, stores accumulators to out and lse, and
// repairs NaN rows.
#pragma once

#include <cstring>

#include "../../core/sequence.h"
#include "../float8.h"
#include "../lanes.cuh"
#include "epilogue.cuh"
#include "nan_rows.cuh"
#include "panels.h"
#include "rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

// P of the row's largest score is 2^kWeightExponent, so that weights down to 2^-17 of it are float8 numbers. FlashAttention-3
// has the same number: a power of two changes no bit of l.
constexpr int kWeightExponent = 8;
constexpr float kWeightUnit = 1.0f / (1 << kWeightExponent);

// The factors of a sequence and a key head. `scale` multiplies <q, k>, or <-q, k> if `negates_query`: a row's largest score
// then always has its largest product. It is never 0, because a hidden score is -inf * scale. If it is NaN, so is `value`.
struct Float8Factors {
  float scale = 1, value = 1;
  bool negates_query = false;

  Float8Factors() = default;  // of a row without keys
  // `call`: of one sequence, with at least one key. In pages the factors do not depend on the row.
  __device__ Float8Factors(const AttentionParams& call, float scale_of_call, int64_t h_kv) {
    const CacheParams& cache = call.varlen.cache;
    const int64_t b = cache.pages ? 0 : cache.cache, row = cache.pages ? 0 : call.varlen.first_k;
    const float factor = scale_of_call * (cache.k_scale ? cache.k_scale.at(b, h_kv, row) : 1.0f);
    constexpr float kLeast = 0x1p-126f;
    negates_query = factor < 0;
    scale = fabsf(factor) < kLeast ? kLeast : fabsf(factor);  // a NaN stays
    value = cache.v_scale ? cache.v_scale.at(b, h_kv, row) : 1.0f;
    if (scale != scale) value = scale;
  }
  // To scores in units of log2. Never NaN: a hidden score would be NaN, too.
  __device__ float scale2() const { return scale == scale ? scale * static_cast<float>(kLog2E) : 1.0f; }
};

// The number in the lower (0) or upper (1) half of a word, a float16 or a bfloat16.
__device__ inline float widen_half(uint32_t word, int half, bool is_float16) {
  if (!is_float16)  // a bfloat16 is the upper half of a float
    return __uint_as_float(half == 0 ? word << 16 : word & 0xffff0000);
  const auto bits = static_cast<uint16_t>(word >> 16 * half);
  __half number;
  std::memcpy(&number, &bits, sizeof(number));
  return widen(number);
}

// Writes a warp's 16 rows of queries to a tile, from `tile_row` of the tile and `row` of the sequence on. They are float8
// numbers in 16 bits. Rows and columns that do not exist become 0.
template <int kHeadDim, class Tile>
__device__ void load_queries(const AttentionParams& call, int64_t h, int row, int tile_row, bool negates,
                             Tile& tile) {
  constexpr int kPiece = 16, kPieces = kHeadDim / kPiece;
  const float sign = negates ? -1.0f : 1.0f;
  const bool is_float16 = call.dtype == DType::kFloat16;
#pragma unroll 1
  for (int n = threadIdx.x % 32; n < kWarpRows * kPieces; n += 32) {
    const int in_warp = n / kPieces, column = n % kPieces * kPiece;
    uint32_t words[4] = {};
    if (row + in_warp < call.sizes.seqlen_q && column < call.sizes.head_dim) {
      const auto* from = reinterpret_cast<const uint4*>(call.q.row<__half>(0, h, row + in_warp) + column);
      const uint4 halves[2] = {from[0], from[1]};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const uint32_t pairs[4] = {halves[m].x, halves[m].y, halves[m].z, halves[m].w};
        float x[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = sign * widen_half(pairs[e / 2], e % 2, is_float16);
        words[2 * m] = ptx::pack_float8(x[0], x[1], x[2], x[3]);
        words[2 * m + 1] = ptx::pack_float8(x[4], x[5], x[6], x[7]);
      }
    }
    *reinterpret_cast<uint4*>(&tile.bytes[0][0] + Tile::offset(tile_row + in_warp, column)) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Rounds P to left operands of O += P V, 32 keys each, in the order of keys that transpose.cuh describes.
template <int kElements>
__device__ void round_weights_to_float8(const float (&s)[kElements], uint32_t (&weights)[kElements / 16][4]) {
#pragma unroll
  for (int k = 0; k < kElements / 16; ++k)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int r = n % 2, at = 16 * k + n / 2 * 8 + 2 * r;
      weights[k][n] = ptx::pack_float8(s[at], s[at + 1], s[at + 4], s[at + 5]);
    }
}

// The factors of a finished row's sum of values, and the row's lse.
__device__ inline RowResult<float> finish_float8_row(const AttentionParams& call, int64_t b, int64_t h,
                                                     const Float8Factors& factors, float max, float sum) {
  RowResult<float> result = finish_row(call, b, h, max * factors.scale, sum);
  if (result.out_factor != 0)
    result.out_factor *= factors.value;  // a row without keys is 0, whatever the factor is
  return result;
}

// Row j of the sequence's keys or values, as a tensor of one row.
__device__ inline Tensor4 float8_row(const AttentionParams& call, const Tensor4& t, int64_t h_kv, int64_t j) {
  const PageTable& pages = call.varlen.cache.pages;
  if (!pages) return {t.row<Float8>(0, h_kv, j)};
  return {t.row<Float8>(pages.page_of(j), h_kv, j % pages.page_size)};
}

// Whether a value row of `rows` holds a NaN. A warp calls it together.
__device__ inline bool has_nan_values(const AttentionParams& call, int64_t h_kv, Range rows) {
  const int64_t column = threadIdx.x % 32 * 8;
  for (int64_t j = rows.begin; j < rows.end; ++j) {
    bool found = false;
    if (column < call.sizes.head_dim_v) {
      const auto* words =
          reinterpret_cast<const uint32_t*>(float8_row(call, call.v, h_kv, j).row<Float8>(0, 0, 0) + column);
      found = has_nan(words[0]) || has_nan(words[1]);
    }
    if (__ballot_sync(kAllLanes, found) != 0) return true;
  }
  return false;
}

// Recomputes the NaN columns of row i of out from its visible keys, as repair_row() of epilogue.cuh does. P is not rounded.
template <class Out, int kHeadDim>
__device__ void repair_float8_row(const AttentionParams& call, int64_t b, int64_t h, int64_t i,
                                  const Float8Factors& factors) {
  using Row = LaneRow<Float8, kHeadDim>;
  const Sizes& z = call.sizes;
  const int64_t h_kv = z.kv_head(h);
  const LaneRow<Out, kHeadDim> q(call.q, 0, h, i, z.head_dim);
  const NanColumns<Out, kHeadDim> columns(call.out, 0, h, i, 0, z.head_dim_v);
  const float sign = factors.negates_query ? -1.0f : 1.0f, scale2 = factors.scale2();
  float max = -kInf<float>, sum = 0;
  LaneRow<Out, kHeadDim> out;
  const Range seen = visible_keys(call.band.without_chunks(), i, i + 1, z.seqlen_k);
  for (int64_t j = seen.end - 1; j >= seen.begin && columns.any_open(out.x); --j) {
    const float product = sign * q.dot(Row(float8_row(call, call.k, h_kv, j), 0, 0, 0, z.head_dim));
    const float new_max = fmaxf(max, product), reference = new_max == -kInf<float> ? 0.0f : new_max * scale2;
    const float factor = ptx::exp2_fast(max * scale2 - reference);
    const float weight = ptx::exp2_fast(product * scale2 - reference);
    max = new_max;
    sum = sum * factor + weight;
    out.scale(factor);
    out.add(weight, Row(float8_row(call, call.v, h_kv, j), 0, 0, 0, z.head_dim_v));
  }
  columns.store(call.out, 0, h, i, finish_float8_row(call, b, h, factors, max, sum).out_factor, out.x);
}

// 0 x NaN is NaN, so a hidden NaN in V can make a visible result NaN. Repairs the NaN rows among a warp's 16 rows, but
// only under one condition. A value row of the block's keys `tiles` holds a NaN and is hidden from one of the 16 rows.
template <class Out, int kHeadDim>
__device__ void repair_float8_rows(const AttentionParams& call, int64_t b, int64_t h, int64_t warp_row,
                                   Range tiles, uint32_t nan_rows, const Float8Factors& factors) {
  const Sizes& z = call.sizes;
  const int64_t h_kv = z.kv_head(h), end_row = smaller<int64_t>(warp_row + kWarpRows, z.seqlen_q);
  if (nan_rows == 0 || warp_row >= end_row) return;
  const DiagonalBand& band = call.band.without_chunks();
  const Range first = visible_keys(band, warp_row, warp_row + 1, z.seqlen_k);
  const Range last = visible_keys(band, end_row - 1, end_row, z.seqlen_k);
  const int64_t end = smaller<int64_t>(tiles.end, z.seqlen_k);
  if (!has_nan_values(call, h_kv, {tiles.begin, smaller(last.begin, end)}) &&
      !has_nan_values(call, h_kv, {larger(first.end, tiles.begin), end}))
    return;
  __syncwarp();  // publishes the lanes' stores of a row to the warp
#pragma unroll 1
  for (int n = 0; n < kWarpRows; ++n)
    if (nan_rows >> n & 1 && warp_row + n < end_row)
      repair_float8_row<Out, kHeadDim>(call, b, h, warp_row + n, factors);
}

// Stores out of a warp's 16 rows, as far as they exist.
template <class Out, int kHeadDim>
__device__ void store_float8_rows(const AttentionParams& call, int64_t b, int64_t h, int64_t warp_row,
                                  Range tiles, const Float8Factors& factors, const float (&o)[kHeadDim / 2]) {
  store_rows<Out>(call.out, 0, h, warp_row, call.sizes.seqlen_q, static_cast<int>(call.sizes.head_dim_v), o);
  repair_float8_rows<Out, kHeadDim>(call, b, h, warp_row, tiles, rows_with_nan(o), factors);
}

// Stores out and lse of a warp's 16 rows, as far as they exist. The dtype of out matters only here, so it is no parameter of
// the kernel.
template <int kHeadDim>
__device__ void finish_float8_rows(const AttentionParams& call, int64_t b, int64_t h, int64_t warp_row,
                                   Range tiles, const Float8Factors& factors, const RowStatistics& statistics,
                                   float (&o)[kHeadDim / 2]) {
  float out_factors[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int64_t i = warp_row + first_row_in_warp() + 8 * r;
    const float sum = total_of_lanes<kRowLanes>(statistics.sum[r]) * kWeightUnit;
    const RowResult<float> result = finish_float8_row(call, b, h, factors, statistics.max[r], sum);
    out_factors[r] = result.out_factor * kWeightUnit;
    if (i < call.sizes.seqlen_q && first_column_in_eight() == 0)
      static_cast<float*>(call.lse)[call.lse_index(b, h, i)] = result.lse;
  }
  scale_rows(o, out_factors);
  if (call.dtype == DType::kFloat16)
    store_float8_rows<__half, kHeadDim>(call, b, h, warp_row, tiles, factors, o);
  else
    store_float8_rows<__nv_bfloat16, kHeadDim>(call, b, h, warp_row, tiles, factors, o);
}

}  // namespace flash_attn_ext::cuda::sm90
