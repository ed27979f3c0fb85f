// Rows of keys and values for one tile: read directly from the caller's memory, or copied from pages or from caches of 8 or
// 4 bits.
#pragma once

#include "widen_nibbles-inl.h"

// The key heads of one task.
struct HeadRange {
  int64_t first, count;
};

inline bool copies_rows(const AttentionParams& p) {
  const CacheParams& cache = p.varlen.cache;
  return cache.pages || cache.dtype != CacheDType::kOfQuery || cache.key_has_value;
}

// Returns whether a row of `t` is only the first part of a key. `t` is p.k or p.v.
inline bool is_part_of_key(const AttentionParams& p, const Tensor4& t) {
  return p.varlen.cache.key_has_value && &t == &p.k;
}

// Returns the groups of `t`. `t` is p.k or p.v.
inline const CacheGroups& groups_of(const AttentionParams& p, const Tensor4& t) {
  return &t == &p.k ? p.varlen.cache.k_groups : p.varlen.cache.v_groups;
}

// Returns whether rows at a distance of so many bytes are in a few sets of the L1 cache.
constexpr bool are_far_rows(int64_t distance) { return distance >= 2048; }

// Copies `count` rows, one after another without gaps.
template <class In>
FA_INLINE Rows<In> copy_rows(const Rows<In>& from, int64_t count, In* to) {
  typedef uint8_t Part __attribute__((vector_size(FA_VECTOR_BYTES), aligned(1), may_alias));
  constexpr int64_t kPart = FA_VECTOR_BYTES / sizeof(In);
  for (int64_t n = 0; n < count; ++n) {
    const In* row = from.row(n);
    In* copy = to + n * from.cols;
    int64_t c = 0;
#pragma GCC unroll 4
    for (; c + kPart <= from.cols; c += kPart)  // a call of memcpy took twice the time
      *reinterpret_cast<Part*>(copy + c) = *reinterpret_cast<const Part*>(row + c);
    std::memcpy(static_cast<void*>(copy + c), row + c, (from.cols - c) * sizeof(In));
  }
  return {to, from.cols, from.cols};
}

// Calls body(n, end, page, row) for runs of the keys [j0, j0 + keys). The keys [n, end) follow each other in a cache or page,
// from this row on.
template <class Body>
inline void for_each_cache_run(const AttentionParams& p, int64_t j0, int64_t keys, const Body& body) {
  const CacheParams& cache = p.varlen.cache;
  const int64_t first = p.varlen.first_k + j0, size = cache.pages ? cache.pages.page_size : int64_t{1} << 62;
  for (int64_t n = 0, end; n < keys; n = end) {
    const int64_t row = first + n;
    end = std::min(keys, n + size - row % size);
    body(n, end, cache.pages ? cache.pages.page_of(row) : cache.cache, row % size);
  }
}

// Calls body(n, count, rows) for the rows [n, n + count) of the tile from key j0 on, page by page.
template <class In, class Body>
inline void for_each_page(const AttentionParams& p, const Tensor4& t, int64_t h_kv, int64_t j0, int64_t keys,
                          int64_t cols, const Body& body) {
  for_each_cache_run(p, j0, keys, [&](int64_t n, int64_t end, int64_t page, int64_t row) {
    body(n, end - n, Rows<In>{t.row<In>(page, h_kv, row), t.stride_s, cols});
  });
}

// Returns rows [j0, j0 + keys) of `t` (k or v) with its scale. If copies_rows(), `copy` has room for the rows at
// distance `ld`.
template <class In>
Rows<In> rows_of_tile(const AttentionParams& p, const Tensor4& t, const CacheScale& scale, int64_t b,
                      int64_t h_kv, int64_t j0, int64_t keys, int64_t cols, In* copy, int64_t ld) {
  if (!copies_rows(p)) return {t.row<In>(b, h_kv, j0), t.stride_s, cols};
  const CacheParams& cache = p.varlen.cache;
  const PageTable& pages = cache.pages;
  const bool is_8_bit = cache.dtype != CacheDType::kOfQuery, is_part = is_part_of_key(p, t);
  const int64_t own_cols = cols - p.sizes.head_dim_v;  // of a part
  const int64_t first = pages ? p.varlen.first_k + j0 : j0, size = pages ? pages.page_size : 0;
  if (!pages && !is_8_bit && !is_part) return {t.row<In>(b, h_kv, j0), t.stride_s, cols};
  if (!is_8_bit && !is_part) {
    if (first / size == (first + keys - 1) / size)
      return {t.row<In>(pages.page_of(first), h_kv, first % size), t.stride_s, cols};
    for_each_page<In>(p, t, h_kv, j0, keys, cols, [&](int64_t n, int64_t count, const Rows<In>& rows) {
      copy_rows(rows, count, copy + n * ld);  // ld is cols
    });
    return {copy, ld, cols};
  }
  for (int64_t n = 0; n < keys;) {
    const int64_t row = pages ? (first + n) % size : first + n;
    const int64_t page = pages ? pages.page_of(first + n) : cache.cache;
    const int64_t count = pages ? std::min(keys - n, size - row) : keys;
    for (int64_t r = 0; r < count; ++r, ++n) {
      In* to = copy + n * ld;
      if (cache.dtype == CacheDType::kLatent) {
        copy_latent(to, t.row<uint8_t>(pages ? page : 0, h_kv, row + r), cols);
      } else if (cache.dtype == CacheDType::kInt4) {
        const int64_t padding =
            pages ? 0 : p.varlen.first_k;  // groups are counted from the cache's first row
        copy_nibbles(to, t.row<uint8_t>(pages ? page : 0, h_kv, row + r), cols, groups_of(p, t), page, h_kv,
                     padding + row + r);
      } else if (is_8_bit) {
        const uint8_t* from = t.row<uint8_t>(pages ? page : 0, h_kv, row + r);
        const int64_t padding =
            pages ? 0 : p.varlen.first_k;  // rows of the scale are counted from the cache's first row
        const float factor = scale ? scale.at(page, h_kv, padding + row + r) : 1.0f;
        for_cache_dtype(cache.dtype, [&](auto dtype) {
          scale ? copy_coded<dtype.value, true>(to, from, cols, factor)
                : copy_coded<dtype.value, false>(to, from, cols, factor);
        });
      } else {  // a part of a key
        const int64_t at = pages ? page : b;
        std::memcpy(to, t.row<In>(at, h_kv, row + r), own_cols * sizeof(In));
        std::memcpy(to + own_cols, p.v.row<In>(at, h_kv, row + r), p.sizes.head_dim_v * sizeof(In));
      }
    }
  }
  return {copy, ld, cols};
}

// Rows per chunk of a decode tile. Each chunk may have another address, as pages have.
constexpr int64_t kChunkRows = 16, kTileChunks = kMostDecodeKeys / kChunkRows;

// Returns the number of keys in the chunks of `keys` keys.
constexpr int64_t whole_chunks(int64_t keys) { return ceil_div(keys, kChunkRows) * kChunkRows; }

// Memory addresses of a tile of K or V. `known` is false for pages of odd sizes, if a chunk is not contiguous.
struct TileSource {
  const char* first = nullptr;  // row 0 of the first head
  int64_t stride = 0, stride_h = 0;
  int64_t bytes = 0, rows = 0;  // bytes: one row of one head
  bool known = false;
  bool in_one_place = false;       // all rows have one distance
  const char* chunk[kTileChunks];  // rows of the first head; only if they are not in one place

  const char* row(int64_t h, int64_t n) const {
    const char* of_first_head =
        in_one_place ? first + n * stride : chunk[n / kChunkRows] + n % kChunkRows * stride;
    return of_first_head + h * stride_h;
  }
  // Returns the end of the run of row `n`. The chunks of a run follow each other in memory, as the chunks of a page do.
  int64_t end_of_run(int64_t n) const {
    if (in_one_place) return rows;  // without the loop, which took 2% of a step
    int64_t c = n / kChunkRows + 1;
    while (c * kChunkRows < rows && chunk[c] == chunk[c - 1] + kChunkRows * stride) ++c;
    return c * kChunkRows;
  }
  // Whether these rows are the first bytes of the rows of `other`.
  bool is_part_of(const TileSource& other) const {
    return known && other.known && first == other.first && stride == other.stride &&
           stride_h == other.stride_h && bytes <= other.bytes;
  }
};

template <class In>
TileSource tile_source(const AttentionParams& p, const Tensor4& t, int64_t b, int64_t j0, int64_t keys,
                       int64_t cols) {
  const CacheParams& cache = p.varlen.cache;
  const int64_t element = cache.dtype == CacheDType::kOfQuery ? sizeof(In) : 1;
  const int64_t first = p.varlen.first_k + j0, page_size = cache.pages ? cache.pages.page_size : 0;
  const int64_t bytes = cache.dtype == CacheDType::kLatent ? kLatentRowBytes
                        : cache.dtype == CacheDType::kInt4 ? cols / 2
                                                           : cols * element;
  TileSource source;
  source.stride = t.stride_s * element;
  source.stride_h = t.stride_h * element;
  source.bytes = bytes;
  source.rows = keys;
  if (is_part_of_key(p, t)) return source;
  const auto address_of = [&](int64_t batch, int64_t row) {
    return static_cast<const char*>(t.data) + (batch * t.stride_b + row * t.stride_s) * element;
  };
  if (!cache.pages) {
    source.first = address_of(b, j0);
    source.known = source.in_one_place = true;
    return source;
  }
  if (first % kChunkRows != 0 || page_size % kChunkRows != 0) return source;
  source.known = source.in_one_place = true;
  for (int64_t key = 0; key < keys;) {
    const int64_t row = (first + key) % page_size, end = std::min(keys, key + page_size - row);
    const char* chunk = address_of(cache.pages.page_of(first + key), row);
    if (key == 0) source.first = chunk;
    source.in_one_place &= chunk == source.first + key * source.stride;
    for (; key < end; key += kChunkRows, chunk += kChunkRows * source.stride)
      source.chunk[key / kChunkRows] = chunk;
  }
  return source;
}

// Addresses of a tile's keys and values.
struct TileSources {
  TileSource keys, values;
};
template <class In>
TileSources tile_sources(const AttentionParams& p, int64_t b, int64_t j0, int64_t keys) {
  return {tile_source<In>(p, p.k, b, j0, keys, p.sizes.head_dim),
          tile_source<In>(p, p.v, b, j0, keys, p.sizes.head_dim_v)};
}

// Returns whether all rows of a head have the same scale.
inline bool is_constant(const AttentionParams& p, const CacheScale& scale) {
  return scale && scale.stride_s == 0 && (!p.varlen.cache.pages || scale.stride_b == 0);
}

// Whether a tile's rows are read page by page in place: pages of whole chunks, without a conversion from 8 bits.
inline bool reads_pages(const AttentionParams& p, int64_t j0) {
  const CacheParams& cache = p.varlen.cache;
  return cache.pages && cache.dtype == CacheDType::kOfQuery && !cache.key_has_value &&
         cache.pages.page_size % kChunkRows == 0 && (p.varlen.first_k + j0) % kChunkRows == 0;
}

// Loads the factors of the 8-bit rows of a tile, one per key, up to `ld` lanes. Returns whether the factors may be
// applied to scores or probabilities instead of rows. It returns false if a factor is not finite, because a masked row
// must stay masked.
template <class T>
bool load_factors(const AttentionParams& p, const CacheScale& scale, int64_t h_kv, int64_t j0, int64_t keys,
                  int64_t ld, T* factors) {
  if (!scale) return false;
  constexpr int64_t L = kLanes<T>;
  std::fill(factors + keys, factors + ld, T(1));
  for_each_cache_run(p, j0, keys, [&](int64_t n, int64_t end, int64_t page, int64_t row) {
    const float* from = scale.data + page * scale.stride_b + h_kv * scale.stride_h + row * scale.stride_s;
    if (scale.stride_s == 0)  // one factor for all rows
      std::fill(factors + n, factors + end, static_cast<T>(*from));
    else
      for (; n < end; ++n, from += scale.stride_s) factors[n] = static_cast<T>(*from);
  });
  // After all stores: a sum of one factor after another takes 1.03 of a decode step (Zen 3).
  Vec<T> probes = {};
  int64_t n = 0;
  for (; n + L <= keys; n += L) probes += load<T>(factors + n) * T(0);
  T probe = sum_lanes<T>(probes);
  for (; n < keys; ++n) probe += factors[n] * T(0);
  return probe == T(0);
}

// As tile_rows(), for rows that are converted or copied.
template <class In>
FA_NOINLINE Rows<In> converted_rows(const AttentionParams& p, const Tensor4& t, const CacheScale& scale,
                                    const TileSource& source, bool multiplied, int64_t b, int64_t h_kv,
                                    int64_t j0, int64_t first, int64_t count, int64_t cols, In* copy) {
  const CacheParams& cache = p.varlen.cache;
  const CacheDType dtype = cache.dtype;
  if (source.known && dtype == CacheDType::kInt4) {
    // The rows of a run may be in several pages. Groups belong to a page.
    for_each_cache_run(p, j0 + first, count, [&](int64_t n, int64_t end, int64_t page, int64_t row) {
      copy_nibble_rows(copy + n * cols, reinterpret_cast<const uint8_t*>(source.row(h_kv, first + n)),
                       source.stride, end - n, cols, groups_of(p, t), page, h_kv, row);
    });
    return {copy, cols, cols};
  }
  if (!source.known || dtype == CacheDType::kLatent || dtype == CacheDType::kInt4 ||
      (dtype != CacheDType::kOfQuery && scale && !multiplied))
    return rows_of_tile<In>(p, t, multiplied ? CacheScale{} : scale, b, h_kv, j0 + first, count, cols, copy,
                            cols);
  for_cache_dtype(dtype, [&](auto coded) {
    // The rows are in one run, so they have one distance.
    copy_coded_rows<coded.value>(copy, cols, reinterpret_cast<const uint8_t*>(source.row(h_kv, first)),
                                 source.stride, count, cols);
  });
  return {copy, cols, cols};
}

// Returns rows [first, first + count) of the tile that begins at key j0, in place or copied. If `multiplied`, the
// factors are applied to the scores or probabilities, not here.
template <class In>
inline Rows<In> tile_rows(const AttentionParams& p, const Tensor4& t, const CacheScale& scale,
                          const TileSource& source, bool multiplied, int64_t b, int64_t h_kv, int64_t j0,
                          int64_t first, int64_t count, int64_t cols, In* copy) {
  if (source.known && p.varlen.cache.dtype == CacheDType::kOfQuery)
    return {reinterpret_cast<const In*>(source.row(h_kv, first)), t.stride_s, cols};
  return converted_rows<In>(p, t, scale, source, multiplied, b, h_kv, j0, first, count, cols, copy);
}

// Returns the same rows of a cache of int8 or int4 without conversion. `cols`: bytes of a row.
inline Rows<int8_t> byte_rows(const AttentionParams& p, const Tensor4& t, const TileSource& source,
                              int64_t h_kv, int64_t j0, int64_t first, int64_t count, int64_t cols,
                              int8_t* copy) {
  if (source.known) return {reinterpret_cast<const int8_t*>(source.row(h_kv, first)), t.stride_s, cols};
  const PageTable& pages = p.varlen.cache.pages;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t row = p.varlen.first_k + j0 + first + n;
    std::memcpy(copy + n * cols, t.row<int8_t>(pages.page_of(row), h_kv, row % pages.page_size), cols);
  }
  return {copy, cols, cols};
}
