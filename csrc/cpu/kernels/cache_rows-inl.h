// Rows of keys and values for one tile: where the caller has them, or, from pages or from 8 bits, copied.
#pragma once

#include "tiles-inl.h"

// kLanes<float> elements of 8 bits. Whole vectors by FA_WIDEN_BYTES where the ISA has it: GCC 12 takes lanes apart one by
// one.
typedef uint8_t Bytes __attribute__((vector_size(kLanes<float>)));
typedef uint8_t UnalignedBytes __attribute__((vector_size(kLanes<float>), aligned(1), may_alias));
#if defined(FA_WIDEN_BYTES)
FA_INLINE U32 widen(Bytes x) { return FA_WIDEN_BYTES(x); }
FA_INLINE VecIndex<float> widen_signed(Bytes x) { return FA_WIDEN_SIGNED_BYTES(x); }
#else
FA_INLINE U32 widen(Bytes x) { return __builtin_convertvector(x, U32); }
FA_INLINE VecIndex<float> widen_signed(Bytes x) {
  typedef int8_t SignedBytes __attribute__((vector_size(kLanes<float>)));
  return __builtin_convertvector((SignedBytes)x, VecIndex<float>);
}
#endif

FA_INLINE Bytes load_bytes(const uint8_t* p, int64_t n) {
  if (n >= kLanes<float>) return *reinterpret_cast<const UnalignedBytes*>(p);
  Bytes bytes = {};
  std::memcpy(&bytes, p, n);
  return bytes;
}

// As floats.
template <CacheDType dtype>
FA_INLINE F32 float_of(Bytes bytes) {
  if constexpr (dtype == CacheDType::kInt8) return __builtin_convertvector(widen_signed(bytes), F32);
  // The bits of a float whose exponent is off by what the two formats' biases differ.
  const U32 bits = widen(bytes), magnitude = bits & 0x7fu, sign = (bits & 0x80u) << 24;
  constexpr bool e4m3 = dtype == CacheDType::kFloat8E4M3;
  const F32 value = (F32)(magnitude << (e4m3 ? 20 : 21)) * (e4m3 ? 0x1p120f : 0x1p112f);
  const U32 inf_or_nan = magnitude == 0x7cu && !e4m3 ? U32{} + 0x7f800000u : U32{} + 0x7fc00000u;
  const auto special = magnitude >= (e4m3 ? 0x7fu : 0x7cu);
  return (F32)((special ? inf_or_nan : (U32)value) | sign);
}

// Copies one row of 8-bit elements, times `scale`.
template <CacheDType dtype, class In>
inline void copy_coded(In* to, const uint8_t* from, int64_t cols, float scale) {
  constexpr int L = kLanes<float>;
  for (int64_t c = 0; c < cols; c += L) {
    const int64_t n = std::min<int64_t>(L, cols - c);
    const F32 value = float_of<dtype>(load_bytes(from + c, n)) * scale;
    if constexpr (std::is_same_v<In, double>) {
      for (int64_t i = 0; i < n; ++i) to[c + i] = value[i];
    } else if (n == L) {
      store_as<In, float>(to + c, value);
    } else {
      store_tail_as<In, float>(to + c, value, n);
    }
  }
}

// body(std::integral_constant<CacheDType, dtype>) for one of the 8-bit ones.
template <class Body>
inline void for_cache_dtype(CacheDType dtype, const Body& body) {
  switch (dtype) {
    case CacheDType::kInt8: return body(std::integral_constant<CacheDType, CacheDType::kInt8>{});
    case CacheDType::kFloat8E4M3: return body(std::integral_constant<CacheDType, CacheDType::kFloat8E4M3>{});
    case CacheDType::kFloat8E5M2: return body(std::integral_constant<CacheDType, CacheDType::kFloat8E5M2>{});
    case CacheDType::kOfQuery: return;
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
        const float factor = scale ? scale.at(page, h_kv, padding + row + r) : 1.0f;
        for_cache_dtype(cache.dtype, [&](auto dtype) { copy_coded<dtype.value>(to, from, cols, factor); });
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

// The rows of a decode tile, in chunks of 16 that may lie anywhere, as pages do.
constexpr int64_t kChunkRows = 16, kTileChunks = 4;

template <class In>
struct TileRows {
  const In* chunk[kTileChunks];
  int64_t stride, cols;

  const In* row(int64_t n) const { return chunk[n / kChunkRows] + n % kChunkRows * stride; }
  Rows<In> from(int64_t n) const { return {row(n), stride, cols}; }  // up to the chunk's end
  bool is_whole() const {
    for (int64_t c = 1; c < kTileChunks; ++c)
      if (chunk[c] && chunk[c] != chunk[0] + c * kChunkRows * stride) return false;
    return true;
  }
};

template <class In>
inline TileRows<In> tile_rows(const Rows<In>& rows) {
  TileRows<In> tile{{}, rows.stride, rows.cols};
  for (int64_t c = 0; c < kTileChunks; ++c) tile.chunk[c] = rows.row(c * kChunkRows);
  return tile;
}

// Where a tile's rows come from: chunks of bytes, to be asked for before they are read. `known` is false where chunks
// do not lie behind each other, in pages of odd sizes.
struct SourceRows {
  const char* chunk[kTileChunks] = {};
  int64_t stride = 0, bytes = 0, rows = 0;  // bytes: of one row
  bool known = false;

  // Always inline: GCC 12 takes a function that does nothing but this for one without effects, and leaves its calls out.
  FA_INLINE void prefetch(int64_t begin, int64_t end) const {
    constexpr int64_t kLine = 64;
    if (!known) return;
    for (int64_t n = begin, last = std::min(end, rows); n < last; ++n) {
      const char* row = chunk[n / kChunkRows] + n % kChunkRows * stride;
      for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at, 0, kPrefetchLevel);
    }
  }
};

template <class In>
SourceRows source_rows(const AttentionParams& p, const Tensor4& t, int64_t b, int64_t h_kv, int64_t j0,
                       int64_t keys, int64_t cols) {
  const CacheParams& cache = p.varlen.cache;
  const int64_t element = cache.dtype == CacheDType::kOfQuery ? sizeof(In) : 1;
  const int64_t first = p.varlen.first_k + j0;
  SourceRows source;
  source.stride = t.stride_s * element;
  source.bytes = cols * element;
  source.rows = keys;
  if (cache.pages && (first % kChunkRows != 0 || cache.pages.page_size % kChunkRows != 0)) return source;
  for (int64_t c = 0; c * kChunkRows < keys; ++c) {
    const int64_t row = first + c * kChunkRows;
    const int64_t at = cache.pages
                           ? cache.pages.page_of(row) * t.stride_b + row % cache.pages.page_size * t.stride_s
                           : b * t.stride_b + (j0 + c * kChunkRows) * t.stride_s;
    source.chunk[c] = static_cast<const char*>(t.data) + (at + h_kv * t.stride_h) * element;
  }
  source.known = true;
  return source;
}

// The factors of a tile's 8-bit rows, one a key, up to `ld` lanes. Null where there are none, or where one is not finite:
// then rows are multiplied themselves, so that what is masked stays masked.
template <class T>
const T* load_factors(const AttentionParams& p, const CacheScale& scale, int64_t h_kv, int64_t j0,
                      int64_t keys, int64_t ld, T* factors) {
  if (!scale) return nullptr;
  const CacheParams& cache = p.varlen.cache;
  const int64_t first = p.varlen.first_k + j0, size = cache.pages ? cache.pages.page_size : int64_t{1} << 62;
  std::fill(factors, factors + ld, T(1));
  T probe = 0;
  for (int64_t n = 0; n < keys;) {
    const int64_t row = first + n, in_page = row % size, end = std::min(keys, n + size - in_page);
    const int64_t page = cache.pages ? cache.pages.page_of(row) : cache.cache;
    for (int64_t r = in_page; n < end; ++n, ++r) {
      factors[n] = static_cast<T>(scale.at(page, h_kv, r));
      probe += factors[n] * T(0);
    }
  }
  return probe == T(0) ? factors : nullptr;
}

// A tile where it can be read, with the factors that its scores or probabilities still need. `next` is asked for while
// rows are copied.
template <class In, class T>
struct DecodeRows {
  TileRows<In> rows;
  const T* factors;  // null: none
};

template <class In, class T>
DecodeRows<In, T> decode_rows(const AttentionParams& p, const Tensor4& t, const CacheScale& scale,
                              const SourceRows& source, int64_t b, int64_t h_kv, int64_t j0, int64_t keys,
                              int64_t cols, int64_t ld, In* copy, T* factors, const SourceRows& next) {
  const CacheParams& cache = p.varlen.cache;
  if (cache.dtype == CacheDType::kOfQuery) {
    if (!source.known)
      return {tile_rows(rows_of_tile<In>(p, t, scale, b, h_kv, j0, keys, cols, copy)), nullptr};
    TileRows<In> tile{{}, t.stride_s, cols};
    for (int64_t c = 0; c < kTileChunks; ++c) tile.chunk[c] = reinterpret_cast<const In*>(source.chunk[c]);
    return {tile, nullptr};
  }
  const T* loaded = load_factors<T>(p, scale, h_kv, j0, keys, ld, factors);
  if (!source.known || (scale && !loaded))
    return {tile_rows(rows_of_tile<In>(p, t, scale, b, h_kv, j0, keys, cols, copy)), nullptr};
  for_cache_dtype(cache.dtype, [&](auto dtype) {
    for (int64_t n = 0; n < keys; ++n) {
      const char* row = source.chunk[n / kChunkRows] + n % kChunkRows * source.stride;
      next.prefetch(n, n + 1);
      copy_coded<dtype.value>(copy + n * cols, reinterpret_cast<const uint8_t*>(row), cols, 1.0f);
    }
  });
  return {tile_rows<In>({copy, cols, cols}), loaded};
}
