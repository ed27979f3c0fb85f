// One element of the score matrix: softcap, ALiBi, mask, band, in this order; and dropout. All tiers use this
// definition, which equals cpu/kernels/scores-inl.h.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "../core/mask.h"
#include "../core/params.h"
#include "../core/philox.h"
#include "convert.h"
#include "product_scale.h"

namespace flash_attn_ext::cuda {

constexpr double kLog2E = 1.4426950408889634074;  // 2^(x log2(e)) = e^x, because only exp2 is fast

template <class T>
constexpr T kInf = std::numeric_limits<T>::infinity();

// The larger one of two values. If one value is NaN, the result is the other value.
template <class T>
__device__ T larger(T a, T b) {
  if constexpr (std::is_same_v<T, float>) {
    return fmaxf(a, b);  // one instruction
  } else {
    return b > a ? b : a;
  }
}

template <class T>
__device__ T smaller(T a, T b) {
  return b < a ? b : a;
}

// Rounds the product before a later addition. Without this, nvcc would fuse both into one instruction, in one kernel
// and not in another. The backward must recompute the forward's scores to the last bit, so that their rounding errors
// cancel in S - lse.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The value that one element of a mask adds to the score; a mask may have any dtype.
template <class T>
__device__ T mask_element(const void* data, DType dtype, int64_t at) {
  switch (dtype) {
    case DType::kBool: return static_cast<const uint8_t*>(data)[at] ? T(0) : -kInf<T>;
    case DType::kFloat32: return static_cast<const float*>(data)[at];
    case DType::kFloat64: return static_cast<T>(static_cast<const double*>(data)[at]);
    case DType::kBFloat16: return widen(static_cast<const __nv_bfloat16*>(data)[at]);
    case DType::kFloat16: break;
  }
  return widen(static_cast<const __half*>(data)[at]);
}

// The sum of the values of both masks; -inf hides the element. finfo.min does not hide: in a row with only finfo.min, P
// is uniform.
template <class T>
__device__ T mask_bias(const MaskParams& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  const T bias = mask_element<T>(
      mask.data, mask.dtype, b * mask.stride_b + h * mask.stride_h + i * mask.stride_q + j * mask.stride_k);
  if (!mask.key_data) return bias;
  const T key = mask_element<T>(mask.key_data, mask.key_dtype, b * mask.key_stride_b + j * mask.key_stride_k);
  return bias == -kInf<T> || key == -kInf<T> ? -kInf<T> : bias + key;
}

template <class T>
struct Score {
  T value;       // -inf if hidden, for any <q, k>, also NaN
  T tanh;        // the softcap's tanh, for its derivative 1 - tanh^2
  bool attends;  // neither the mask, nor the band, nor the end of the tensors hides it
};

template <class T>
__device__ T alibi_slope(const AlibiParams& alibi, int64_t b, int64_t h) {
  return static_cast<const T*>(alibi.slopes)[b * alibi.stride_b + h * alibi.stride_h];
}

template <class T>
__device__ T alibi_distance(const Band& band, int64_t i, int64_t j) {
  const int64_t distance = i + band.diagonal - j;
  return static_cast<T>(distance < 0 ? -distance : distance);
}

// The chunks of a tile whose first query row is `i0`. Divides once for the tile. A division for each element would need
// too many registers.
class TileChunks {
 public:
  __device__ TileChunks(const Band& band, int64_t i0)
      : begin_(band.chunks ? band.chunks.begin(i0 + band.diagonal) : 0) {}

  // Whether query row i >= i0 and key j are in one chunk. Steps over the chunks between the rows i0 and i.
  __device__ bool same(const Band& band, int64_t i, int64_t j) const {
    const int64_t size = band.chunks.size;
    if (size == 0) return true;
    int64_t begin = begin_;
    while (begin + size <= i + band.diagonal) begin += size;
    return begin <= j && j < begin + size;
  }

 private:
  int64_t begin_;  // the first position of the chunk of row i0
};

// The band without its chunks. `scaled` is <q, k> times product_scale(). `in_mask`: the mask has an element for (i, j).
// A tree mask has no elements for the keys before the tree.
template <class T>
__device__ Score<T> finish_scaled_score(const AttentionParams& p, T scaled, int64_t b, int64_t h, int64_t i,
                                        int64_t j, bool inside, bool in_mask = true) {
  const Score<T> masked{-kInf<T>, T(0), false};
  if (!inside || !in_band(p.band.without_chunks(), i, j)) return masked;
  T score = scaled, t = 0;
  if (has_softcap(p)) {
    t = std::tanh(score);
    score = rounded_product(t, static_cast<T>(p.softcap));
  }
  if (p.alibi) score -= rounded_product(alibi_slope<T>(p.alibi, b, h), alibi_distance<T>(p.band, i, j));
  if (p.mask && in_mask) {
    const T bias = mask_bias<T>(p.mask, b, h, i, j);
    if (bias == -kInf<T>) return masked;
    score += bias;
  }
  return {score, t, true};
}

// The same from the product <q, k>, and with chunks.
template <class T>
__device__ Score<T> finish_score(const AttentionParams& p, const TileChunks& chunks, T product, int64_t b,
                                 int64_t h, int64_t i, int64_t j, bool inside, bool in_mask = true) {
  const bool in_chunk = chunks.same(p.band, i, j);
  return finish_scaled_score(p, rounded_product(product, product_scale<T>(p)), b, h, i, j, inside && in_chunk,
                             in_mask);
}

// The factor of an element of P: 1 / (1 - p) if it is kept, 0 if it is dropped.
template <class T>
__device__ T dropout_factor(const AttentionParams& p, PhiloxKey key, int64_t b, int64_t h, int64_t i,
                            int64_t j) {
  const DropoutParams d = p.dropout.at_row(i);
  const bool kept = dropout_keeps(key, d.threshold, d.head(b, h, p.sizes.heads), d.row(i), d.col(j));
  return kept ? static_cast<T>(d.keep_scale) : T(0);
}

__device__ inline PhiloxKey dropout_key(const DropoutParams& dropout) {
  return dropout ? philox_key(dropout.rng_state[0], dropout.rng_state[1]) : PhiloxKey{};
}

// The result of a row: the factor of its sum of values, and lse.
template <class T>
struct RowResult {
  T out_factor, lse;
};

// The maximum of a row, and the row's sum of exp(score - max).
template <class T>
struct RowSum {
  T max, sum;
};

// Adds the sink's column, if there is a sink.
template <class T>
__device__ RowSum<T> add_sink(const AttentionParams& p, int64_t b, int64_t h, RowSum<T> row) {
  if (!p.sink) return row;
  const T sink = p.sink.of<T>(b, h);
  if (sink == -kInf<T>) return row;
  const T max = larger(row.max, sink);
  return {max, row.sum * std::exp(row.max - max) + std::exp(sink - max)};
}

// If nothing is visible, the sum is 0: out is 0 and lse is -inf, by contract. A NaN score makes the sum NaN.
template <class T>
__device__ RowResult<T> finish_sum(RowSum<T> row) {
  if (row.sum == T(0)) return {T(0), -kInf<T>};
  return {T(1) / row.sum, row.max + std::log(row.sum)};
}

// Computes the result of a row from the maximum and the sum over its keys. Adds the sink.
template <class T>
__device__ RowResult<T> finish_row(const AttentionParams& p, int64_t b, int64_t h, T max, T sum) {
  const RowSum<T> row = add_sink(p, b, h, RowSum<T>{max, sum});
  RowResult<T> result = finish_sum(row);
  if (p.sink && result.out_factor != T(0)) result.out_factor *= std::exp(max - row.max);
  return result;
}

}  // namespace flash_attn_ext::cuda
