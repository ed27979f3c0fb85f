// Rows of keys and values for one tile: where the caller has them, or, from pages or from 8 bits, copied.
#pragma once

#include "tiles-inl.h"

// kLanes<T> elements of 8 bits as T.
FA_INLINE F32 widen_bytes(const uint8_t* p, int64_t n, CacheDType dtype) {
  constexpr int L = kLanes<float>;
  typedef uint8_t Bytes __attribute__((vector_size(L)));
  typedef int8_t SignedBytes __attribute__((vector_size(L)));
  Bytes bytes = {};
  std::memcpy(&bytes, p, n < L ? n : L);
  if (dtype == CacheDType::kInt8) return __builtin_convertvector((SignedBytes)bytes, F32);
  // The bits of a float whose exponent is off by what the two formats' biases differ.
  const U32 bits = __builtin_convertvector(bytes, U32), magnitude = bits & 0x7fu, sign = (bits & 0x80u) << 24;
  const bool e4m3 = dtype == CacheDType::kFloat8E4M3;
  const F32 value = (F32)(magnitude << (e4m3 ? 20 : 21)) * (e4m3 ? 0x1p120f : 0x1p112f);
  const U32 inf_or_nan = magnitude == 0x7cu && !e4m3 ? U32{} + 0x7f800000u : U32{} + 0x7fc00000u;
  const auto special = magnitude >= (e4m3 ? 0x7fu : 0x7cu);
  return (F32)((special ? inf_or_nan : (U32)value) | sign);
}

// Copies one row of 8-bit elements, times `scale`.
template <class In>
inline void copy_scaled(In* to, const uint8_t* from, int64_t cols, CacheDType dtype, float scale) {
  constexpr int L = kLanes<float>;
  for (int64_t c = 0; c < cols; c += L) {
    const int64_t n = std::min<int64_t>(L, cols - c);
    const F32 value = widen_bytes(from + c, n, dtype) * scale;
    if constexpr (std::is_same_v<In, double>) {
      for (int64_t i = 0; i < n; ++i) to[c + i] = value[i];
    } else if (n == L) {
      store_as<In, float>(to + c, value);
    } else {
      store_tail_as<In, float>(to + c, value, n);
    }
  }
}

inline bool copies_rows(const AttentionParams& p) {
  return p.varlen.cache.pages || p.varlen.cache.dtype != CacheDType::kOfQuery;
}

// Rows [j0, j0 + keys) of `t`, which is k or v with its scale. `copy` has room for them if copies_rows().
template <class In>
Rows<In> rows_of_tile(const AttentionParams& p, const Tensor4& t, const CacheScale& scale, int64_t b,
                      int64_t h_kv, int64_t j0, int64_t keys, int64_t cols, In* copy) {
  if (!copies_rows(p)) return {t.row<In>(b, h_kv, j0), t.stride_s, cols};
  const CacheParams& cache = p.varlen.cache;
  const PageTable& pages = cache.pages;
  const bool is_8_bit = cache.dtype != CacheDType::kOfQuery;
  const int64_t first = pages ? p.varlen.first_k + j0 : j0, size = pages ? pages.page_size : 0;
  if (pages && !is_8_bit && first / size == (first + keys - 1) / size)
    return {t.row<In>(pages.page_of(first), h_kv, first % size), t.stride_s, cols};
  for (int64_t n = 0; n < keys;) {
    const int64_t row = pages ? (first + n) % size : first + n;
    const int64_t page = pages ? pages.page_of(first + n) : cache.cache;
    const int64_t count = pages ? std::min(keys - n, size - row) : keys;
    for (int64_t r = 0; r < count; ++r, ++n) {
      In* to = copy + n * cols;
      if (is_8_bit) {
        const uint8_t* from = t.row<uint8_t>(pages ? page : 0, h_kv, row + r);
        const int64_t padding =
            pages ? 0 : p.varlen.first_k;  // the scale's rows are counted from the cache's start
        copy_scaled<In>(to, from, cols, cache.dtype, scale ? scale.at(page, h_kv, padding + row + r) : 1.0f);
      } else {
        std::memcpy(to, t.row<In>(page, h_kv, row + r), cols * sizeof(In));
      }
    }
  }
  return {copy, cols, cols};
}

template <class In>
Rows<In> key_rows(const AttentionParams& p, int64_t b, int64_t h_kv, int64_t j0, int64_t keys, In* copy) {
  return rows_of_tile<In>(p, p.k, p.varlen.cache.k_scale, b, h_kv, j0, keys, p.sizes.head_dim, copy);
}

template <class In>
Rows<In> value_rows(const AttentionParams& p, int64_t b, int64_t h_kv, int64_t j0, int64_t keys, In* copy) {
  return rows_of_tile<In>(p, p.v, p.varlen.cache.v_scale, b, h_kv, j0, keys, p.sizes.head_dim_v, copy);
}
