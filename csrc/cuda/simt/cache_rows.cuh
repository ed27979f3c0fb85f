// Rows of keys and values in a cache: in pages, or of 8 or 4 bits, which are multiplied by factors when they are read.
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

// Element n of a row of scales or zero points.
__device__ inline float group_number(const void* row, bool is_float16, int64_t n) {
  return is_float16 ? widen(static_cast<const __half*>(row)[n]) : static_cast<const float*>(row)[n];
}

// The scales and zero points of an int4 row.
struct RowGroups {
  const void *scales, *zeros;
  int32_t columns, is_float16;

  __device__ float value(int32_t nibble, int32_t col) const {
    const int32_t group = col / columns;
    const float zero = zeros ? group_number(zeros, is_float16, group) : kInt4Zero;
    return (nibble - zero) * group_number(scales, is_float16, group);
  }
};

// One row: elements of type In, or of 8 or 4 bits.
template <class In>
struct CacheRow {
  const void* data = nullptr;  // null: the row does not exist
  float factor = 1.0f;
  int32_t dtype = 0;  // a CacheDType in a whole word: padding would be copied uninitialised
  // Only for kInt4. In shared memory, because with copies of the numbers the kernel of float64 spilled registers.
  const RowGroups* groups = nullptr;

  __device__ explicit operator bool() const { return data != nullptr; }
  __device__ Accumulator<In> operator[](int64_t col) const {
    const auto type = static_cast<CacheDType>(dtype);
    if (type == CacheDType::kOfQuery) return widen(static_cast<const In*>(data)[col]);
    const uint8_t* bytes = static_cast<const uint8_t*>(data);
    if (type != CacheDType::kInt4) return number_of(type, bytes[col]) * factor;
    const int32_t c = static_cast<int32_t>(col);
    return groups->value(bytes[c / 2] >> (c % 2 * 4) & 15, c);
  }
};

// Row j of the keys or values of one sequence. Writes the groups of an int4 row to `of_row`.
template <class In>
__device__ CacheRow<In> cache_row(const VarlenParams& varlen, const Tensor4& t, const CacheScale& scale,
                                  const CacheGroups& groups, int64_t h_kv, int64_t j, RowGroups& of_row) {
  const CacheParams& cache = varlen.cache;
  // Pages and rows of scales count from the start of the cache; rows of t from the start of the sequence.
  const int64_t in_cache = varlen.first_k + j;
  const int64_t page = cache.pages ? cache.pages.page_of(in_cache) : cache.cache;
  const int64_t in_page = cache.pages ? in_cache % cache.pages.page_size : in_cache;
  const int64_t b = cache.pages ? page : 0, row = cache.pages ? in_page : j;
  if (cache.dtype == CacheDType::kOfQuery) return {t.row<In>(b, h_kv, row)};
  CacheRow<In> found{t.row<uint8_t>(b, h_kv, row), scale ? scale.at(page, h_kv, in_page) : 1.0f,
                     static_cast<int32_t>(cache.dtype)};
  if (cache.dtype != CacheDType::kInt4) return found;
  const auto row_of = [&](const Tensor4& numbers) -> const void* {
    if (!numbers) return nullptr;
    if (groups.is_float16) return numbers.row<__half>(page, h_kv, in_page);
    return numbers.row<float>(page, h_kv, in_page);
  };
  of_row = {row_of(groups.scales), row_of(groups.zeros), static_cast<int32_t>(groups.columns),
            groups.is_float16};
  found.groups = &of_row;
  return found;
}

// The rows of one tile. Each row is looked up once, because the page number needs a division.
template <class In>
struct CacheTile {
  CacheRow<In> found_keys[kBlockK], found_values[kBlockK];
  RowGroups key_groups[kBlockK], value_groups[kBlockK];

  // The next barrier publishes them.
  __device__ void look_up(const AttentionParams& p, int64_t h_kv, int64_t j0, int count) {
    const CacheParams& cache = p.varlen.cache;
    for (int n = threadIdx.x; n < 2 * count; n += kThreads) {
      if (n < count) {
        const CacheRow<In> found =
            cache_row<In>(p.varlen, p.k, cache.k_scale, cache.k_groups, h_kv, j0 + n, key_groups[n]);
        found_keys[n] = found;
      } else {
        const CacheRow<In> found = cache_row<In>(p.varlen, p.v, cache.v_scale, cache.v_groups, h_kv,
                                                 j0 + n - count, value_groups[n - count]);
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

// A tree mask has columns from key first_masked on. Moves its start, so that key numbers index it.
__device__ inline void count_columns_by_key(const CacheParams& cache, MaskParams& mask) {
  if (!cache.tree_mask || !mask) return;
  mask.data = static_cast<const char*>(mask.data) - cache.first_masked * mask.stride_k * bytes_of(mask.dtype);
}

}  // namespace flash_attn_ext::cuda::simt
