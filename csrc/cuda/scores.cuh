// One element of the score matrix: softcap, ALiBi, mask, band, in that order; and dropout. Every tier's
// definition, the same as that of cpu/kernels/scores-inl.h.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "../core/mask.h"
#include "../core/params.h"
#include "../core/philox.h"
#include "convert.h"

namespace flash_attn_ext::cuda {

// Scores are kept in units of log2, so that softmax needs exp2 only: score2 = score * log2(e).
constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2 = 0.69314718055994530942;

template <class T>
constexpr T kInf = std::numeric_limits<T>::infinity();

// The larger one of a number and what may be NaN: never the NaN.
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

// What the mask adds, in units of log2; -inf masks. A finite value stays finite, also finfo.min, which times
// log2(e) is out of range: a row that holds nothing else is not masked, it is uniform.
template <class T>
__device__ T mask_bias(const MaskParams& mask, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t at = b * mask.stride_b + h * mask.stride_h + i * mask.stride_q + j * mask.stride_k;
  T value;
  switch (mask.dtype) {
    case DType::kBool: return static_cast<const uint8_t*>(mask.data)[at] ? T(0) : -kInf<T>;
    case DType::kFloat32: value = static_cast<const float*>(mask.data)[at]; break;
    case DType::kFloat64: value = static_cast<T>(static_cast<const double*>(mask.data)[at]); break;
    case DType::kBFloat16: value = widen(static_cast<const __nv_bfloat16*>(mask.data)[at]); break;
    default: value = widen(static_cast<const __half*>(mask.data)[at]); break;
  }
  constexpr T kLargest = std::numeric_limits<T>::max();
  const T bias = value * T(kLog2E);
  if (bias == -kInf<T> && value >= -kLargest) return -kLargest;
  if (bias == kInf<T> && value <= kLargest) return kLargest;
  return bias;
}

template <class T>
struct Score {
  T value;       // score2; -inf if masked, whatever <q, k> was, NaN included
  T tanh;        // of the softcap, for its derivative 1 - tanh^2
  bool attends;  // neither the mask, nor the band, nor the end of the tensors hides it
};

// What <q, k> is multiplied with first.
template <class T>
__device__ T product_scale(const AttentionParams& p) {
  return static_cast<T>(p.softcap > 0 ? p.scale / p.softcap : p.scale * kLog2E);
}

template <class T>
__device__ T alibi_slope(const AlibiParams& alibi, int64_t b, int64_t h) {
  return static_cast<const T*>(alibi.slopes)[b * alibi.stride_b + h * alibi.stride_h];
}

template <class T>
__device__ T alibi_distance(const Band& band, int64_t i, int64_t j) {
  const int64_t distance = i + band.diagonal - j;
  return static_cast<T>(distance < 0 ? -distance : distance);
}

// `scaled` is <q, k> times product_scale(), which a kernel computes once: it takes fp64.
template <class T>
__device__ Score<T> finish_scaled_score(const AttentionParams& p, T scaled, int64_t b, int64_t h, int64_t i,
                                        int64_t j, bool inside) {
  const Score<T> masked{-kInf<T>, T(0), false};
  if (!inside || !in_band(p.band, i, j)) return masked;
  T score = scaled, t = 0;
  if (p.softcap > 0) {
    t = std::tanh(score);
    score = t * static_cast<T>(p.softcap * kLog2E);
  }
  if (p.alibi) score -= alibi_slope<T>(p.alibi, b, h) * T(kLog2E) * alibi_distance<T>(p.band, i, j);
  if (p.mask) {
    const T bias = mask_bias<T>(p.mask, b, h, i, j);
    if (bias == -kInf<T>) return masked;
    score += bias;
  }
  return {score, t, true};
}

template <class T>
__device__ Score<T> finish_score(const AttentionParams& p, T product, int64_t b, int64_t h, int64_t i,
                                 int64_t j, bool inside) {
  return finish_scaled_score(p, product * product_scale<T>(p), b, h, i, j, inside);
}

// The factor of an element of P: 1 / (1 - p) where it is kept, 0 where it is dropped.
template <class T>
__device__ T dropout_factor(const AttentionParams& p, PhiloxKey key, int64_t b, int64_t h, int64_t i,
                            int64_t j) {
  const bool kept = dropout_keeps(key, p.dropout.threshold, b * p.sizes.heads + h, i, j);
  return kept ? static_cast<T>(p.dropout.keep_scale) : T(0);
}

__device__ inline PhiloxKey dropout_key(const DropoutParams& dropout) {
  return dropout ? philox_key(dropout.rng_state[0], dropout.rng_state[1]) : PhiloxKey{};
}

// What a row ends with: the factor of its summed-up values, and lse.
template <class T>
struct RowResult {
  T out_factor, lse;
};

// A row's maximum, in units of log2, and its sum relative to it.
template <class T>
struct RowSum {
  T max, sum;
};

// With the sink's column, if there is one.
template <class T>
__device__ RowSum<T> add_sink(const AttentionParams& p, int64_t b, int64_t h, RowSum<T> row) {
  if (!p.sink) return row;
  const T sink = p.sink.of<T>(b, h) * T(kLog2E);
  if (sink == -kInf<T>) return row;
  const T max = larger(row.max, sink);
  return {max, row.sum * std::exp2(row.max - max) + std::exp2(sink - max)};
}

// From the maximum and the sum over a row's keys. Nothing visible leaves the sum 0 (a NaN score leaves it NaN): out
// is 0 and lse that of the sink alone, -inf without one, by contract.
template <class T>
__device__ RowResult<T> finish_row(const AttentionParams& p, int64_t b, int64_t h, T max, T sum) {
  const RowSum<T> row = add_sink(p, b, h, RowSum<T>{max, sum});
  if (row.sum == T(0)) return {T(0), -kInf<T>};
  const T weight = p.sink ? std::exp2(max - row.max) : T(1);
  return {weight / row.sum, row.max * T(kLn2) + std::log(row.sum)};
}

}  // namespace flash_attn_ext::cuda
