// Rows of keys and values in a cache: in pages, or of 8 bits, which are multiplied by a factor when they are read.
#pragma once

#include "tile.cuh"

namespace flash_attn_ext::cuda::simt {

// The value of an element of 8 bits.
__device__ inline float number_of(CacheDType dtype, uint8_t byte) {
  if (dtype == CacheDType::kInt8) return static_cast<int8_t>(byte);
  const bool e4m3 = dtype == CacheDType::kFloat8E4M3;
  const uint32_t magnitude = byte & 0x7fu;
  // The bits of a float, with an exponent that is off by the difference of the formats' biases.
  float value = __uint_as_float(magnitude << (e4m3 ? 20 : 21)) * (e4m3 ? 0x1p120f : 0x1p112f);
  if (magnitude >= (e4m3 ? 0x7fu : 0x7cu)) value = !e4m3 && magnitude == 0x7cu ? kInf<float> : NAN;
  return byte & 0x80u ? -value : value;
}

// One row: elements of type In, or of 8 bits.
template <class In>
struct CacheRow {
  const void* data = nullptr;  // null: there is no such row
  float factor = 1.0f;
  int32_t dtype = 0;  // a CacheDType in a whole word: padding would be copied uninitialised

  __device__ explicit operator bool() const { return data != nullptr; }
  __device__ Accumulator<In> operator[](int64_t col) const {
    const auto type = static_cast<CacheDType>(dtype);
    if (type == CacheDType::kOfQuery) return widen(static_cast<const In*>(data)[col]);
    return number_of(type, static_cast<const uint8_t*>(data)[col]) * factor;
  }
};

// Row j of the keys or values of one sequence.
template <class In>
__device__ CacheRow<In> cache_row(const VarlenParams& varlen, const Tensor4& t, const CacheScale& scale,
                                  int64_t h_kv, int64_t j) {
  const CacheParams& cache = varlen.cache;
  // Pages and rows of scales count from the start of the cache; rows of t from the start of the sequence.
  const int64_t in_cache = varlen.first_k + j;
  const int64_t page = cache.pages ? cache.pages.page_of(in_cache) : cache.cache;
  const int64_t in_page = cache.pages ? in_cache % cache.pages.page_size : in_cache;
  const int64_t b = cache.pages ? page : 0, row = cache.pages ? in_page : j;
  if (cache.dtype == CacheDType::kOfQuery) return {t.row<In>(b, h_kv, row)};
  return {t.row<uint8_t>(b, h_kv, row), scale ? scale.at(page, h_kv, in_page) : 1.0f,
          static_cast<int32_t>(cache.dtype)};
}

// The rows of one tile. Each row is looked up once, because a page takes a division.
template <class In>
struct CacheTile {
  CacheRow<In> found_keys[kBlockK], found_values[kBlockK];

  // The next barrier publishes them.
  __device__ void look_up(const AttentionParams& p, int64_t h_kv, int64_t j0, int count) {
    const CacheParams& cache = p.varlen.cache;
    for (int n = threadIdx.x; n < 2 * count; n += kThreads) {
      if (n < count) {
        const CacheRow<In> found = cache_row<In>(p.varlen, p.k, cache.k_scale, h_kv, j0 + n);
        found_keys[n] = found;
      } else {
        const CacheRow<In> found = cache_row<In>(p.varlen, p.v, cache.v_scale, h_kv, j0 + n - count);
        found_values[n - count] = found;
      }
    }
  }
};

// Looked-up rows with the interface of Rows.
template <class In>
struct FoundRows {
  const CacheRow<In>* first;
  int64_t count;

  __device__ CacheRow<In> operator()(int n) const { return n < count ? first[n] : CacheRow<In>{}; }
};

// A tree's mask has columns from key first_masked on. Moves its start, so that keys index it.
__device__ inline void count_columns_by_key(const CacheParams& cache, MaskParams& mask) {
  if (!cache.tree_mask || !mask) return;
  mask.data = static_cast<const char*>(mask.data) - cache.first_masked * mask.stride_k * bytes_of(mask.dtype);
}

}  // namespace flash_attn_ext::cuda::simt
