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

// Returns rows [j0, j0 + keys) of `t` (k or v) with its scale. If copies_rows(), `copy` has room for the rows at
// distance `ld`.
template <class In>
Rows<In> rows_of_tile(const AttentionParams& p, const Tensor4& t, const CacheScale& scale, int64_t b,
                      int64_t h_kv, int64_t j0, int64_t keys, int64_t cols, In* copy, int64_t ld) {
  if (!copies_rows(p)) return {t.row<In>(b, h_kv, j0), t.stride_s, cols};
  const CacheParams& cache = p.varlen.cache;
  const PageTable& pages = cache.pages;
  const bool is_8_bit = cache.dtype != CacheDType::kOfQuery, is_part = is_part_of_key(p, t);
  const int64_t own_cols = is_part ? cols - p.sizes.head_dim_v : cols;
  const int64_t first = pages ? p.varlen.first_k + j0 : j0, size = pages ? pages.page_size : 0;
  if (!pages && !is_8_bit && !is_part) return {t.row<In>(b, h_kv, j0), t.stride_s, cols};
  if (pages && !is_8_bit && !is_part && first / size == (first + keys - 1) / size)
    return {t.row<In>(pages.page_of(first), h_kv, first % size), t.stride_s, cols};
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
      } else {
        const int64_t at = pages ? page : b;
        std::memcpy(to, t.row<In>(at, h_kv, row + r), own_cols * sizeof(In));
        if (is_part)
          std::memcpy(to + own_cols, p.v.row<In>(at, h_kv, row + r), p.sizes.head_dim_v * sizeof(In));
      }
    }
  }
  return {copy, ld, cols};
}

// Rows per chunk of a decode tile. Each chunk may have another address, as pages have.
constexpr int64_t kChunkRows = 16, kTileChunks = kMostDecodeKeys / kChunkRows;

// Memory addresses of a tile of K or V. `known` is false for pages of odd sizes, if a chunk is not contiguous.
struct TileSource {
  const char* chunk[kTileChunks] = {};  // addresses for the first head
  int64_t stride = 0, stride_h = 0;
  int64_t bytes = 0, rows = 0;  // bytes: one row of one head
  bool known = false;

  const char* row(int64_t h, int64_t n) const {
    return chunk[n / kChunkRows] + n % kChunkRows * stride + h * stride_h;
  }
  // Whether these rows are the first bytes of the rows of `other`.
  bool is_part_of(const TileSource& other) const {
    return known && other.known && chunk[0] == other.chunk[0] && stride == other.stride &&
           stride_h == other.stride_h && bytes <= other.bytes;
  }
  bool in_one_place() const {
    for (int64_t c = 1; c * kChunkRows < rows; ++c)
      if (chunk[c] != chunk[0] + c * kChunkRows * stride) return false;
    return known;
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
  TileSource source{{}, t.stride_s * element, t.stride_h * element, bytes, keys, false};
  if (is_part_of_key(p, t)) return source;
  if (cache.pages && (first % kChunkRows != 0 || page_size % kChunkRows != 0)) return source;
  const char* tile = static_cast<const char*>(t.data) + (b * t.stride_b + j0 * t.stride_s) * element;
  int64_t end_of_page = 0;  // the first key of the tile in another page
  for (int64_t c = 0; c * kChunkRows < keys; ++c) {
    if (cache.pages && c * kChunkRows >= end_of_page) {  // one division for each page, not for each chunk
      const int64_t key = c * kChunkRows, row = (first + key) % page_size;
      const int64_t at = cache.pages.page_of(first + key) * t.stride_b + (row - key) * t.stride_s;
      tile = static_cast<const char*>(t.data) + at * element;
      end_of_page = key + page_size - row;
    }
    source.chunk[c] = tile + c * kChunkRows * source.stride;
  }
  source.known = true;
  return source;
}

// Returns the number of cache lines of `count` elements.
template <class In>
constexpr int64_t lines_of(int64_t count) {
  return ceil_div(count * static_cast<int64_t>(sizeof(In)), 64);
}

// Addresses of a tile's keys and values.
struct TileSources {
  TileSource keys, values;
};

// Returns whether rows are prefetched. K and V of a small dense call are probably in L2 already. Then a prefetch takes
// as long as a load. Two cores of most CPUs with AVX-512 have 2 MiB of L2 or more. Only float32 counts on them: other types,
// and AVX2, are slower without prefetches if K and V come from L3.
inline bool prefetches_rows(const AttentionParams& p, int threads) {
  constexpr int64_t kBytesInL2 = 1 << 20;
  const Sizes& z = p.sizes;
  const bool counts_two = FA_VECTOR_BYTES == 64 && p.dtype == DType::kFloat32 && threads > 1;
  return p.varlen || z.batch * z.heads_kv * z.seqlen_k * (z.head_dim + z.head_dim_v) * bytes_of(p.dtype) >
                         (counts_two ? 2 : 1) * kBytesInL2;
}

// Prefetches rows of some heads: first the rest of `current`, then the start of `next`, in memory order.
// Prefetches a few lines at a time: too many at once would stall each other and the computation.
class Prefetcher {
 public:
  Prefetcher() = default;
  // `queries`: the rows of Q that each row is multiplied with.
  Prefetcher(const TileSource& current, const TileSource& next, const HeadRange& heads, int64_t queries)
      : heads_(heads),
        source_(&current),
        next_(&next),
        ahead_(rows_ahead(current, heads, queries)),
        into_l1_(fits_l1(current, heads, ahead_)),
        row_(ahead_),
        end_row_(rows_of(current)) {}

  // Prefetches the rows [first, last) of one tile.
  Prefetcher(const TileSource& source, int64_t first, int64_t last, const HeadRange& heads)
      : heads_(heads),
        source_(&source),
        next_(&source),
        row_(first),
        end_row_(std::min(rows_of(source), last)) {}
  // Whether a whole tile is prefetched ahead. Then keys are prefetched during work on keys, and values during work on
  // values.
  static bool is_tile_ahead(const TileSource& source, const HeadRange& heads, int64_t queries) {
    return rows_ahead(source, heads, queries) == kTileChunks * kChunkRows;
  }

  // Always inline, because GCC 12 removes calls of a function that only prefetches. Lines of one row take few instructions
  // and no call: a call would store the sums that the caller has in registers.
  FA_INLINE void lines(int64_t count) {
    if (at_ >= end_ && rows_left_ > 0) next_row_of_chunk();
    const int64_t stored = count >> log2_parts_;
    if (stored << log2_parts_ == count && end_ - at_ >= stored * kLine) {
      const char* from = at_;
      if (into_l1_) {
#pragma GCC unroll 16
        for (int64_t n = 0; n < stored; ++n) __builtin_prefetch(from + n * kLine, 0, kPrefetchLevelOfL1);
      } else if (log2_parts_ == 0) {
#pragma GCC unroll 16
        for (int64_t n = 0; n < count; ++n) __builtin_prefetch(from + n * kLine, 0, kPrefetchLevel);
      } else {
        for (int64_t n = 0; n < stored; ++n) __builtin_prefetch(from + n * kLine, 0, kPrefetchLevel);
      }
      at_ = from + stored * kLine;
    } else if (__builtin_expect(source_ != nullptr, false)) {
      lines_of_some_rows(count);
    }
  }
  // After this call, lines(count) prefetches count / 2^log2 lines: the caller's elements are wider than the stored ones, or
  // the caller reads each row several times.
  void divide_lines(int log2) { log2_parts_ = log2; }
  // Prefetches all remaining lines.
  void finish() {
    if (source_) lines_of_some_rows(std::numeric_limits<int64_t>::max() / 2);
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes

  // The prefetch distance: whole chunks, with enough bytes to hide the latency. Measured with AVX-512: few queries are fast
  // with 16 KiB, which are prefetched into L1. Products of many queries take longer, so that 64 KiB are better. These
  // stay in L2.
  static constexpr int64_t kBytesInL1 = 16 << 10;
  static int64_t rows_ahead(const TileSource& source, const HeadRange& heads, int64_t queries) {
    const int64_t bytes = FA_VECTOR_BYTES < 64 ? 32 << 10 : queries < 8 ? kBytesInL1 : 64 << 10;
    int64_t chunks = 1;
    while (chunks < kTileChunks && chunks * heads.count * source.bytes * kChunkRows < bytes) ++chunks;
    return chunks * kChunkRows;
  }
  static bool fits_l1(const TileSource& source, const HeadRange& heads, int64_t rows) {
    return FA_VECTOR_BYTES == 64 && rows * heads.count * source.bytes <= kBytesInL1;
  }
  static int64_t rows_of(const TileSource& source) { return source.known ? source.rows : 0; }

  FA_INLINE void next_row_of_chunk() {
    --rows_left_;
    at_ = end_ + source_->stride - row_bytes_;
    end_ = at_ + row_bytes_;
  }
  void prefetch(const char* line) const {
    if (into_l1_)
      __builtin_prefetch(line, 0, kPrefetchLevelOfL1);
    else
      __builtin_prefetch(line, 0, kPrefetchLevel);
  }
  __attribute__((noinline)) void lines_of_some_rows(int64_t count) {
    due_ += count;
    const int64_t stored = due_ >> log2_parts_;
    due_ -= stored << log2_parts_;
    for (int64_t n = 0; n < stored; ++n, at_ += kLine) {
      if (at_ >= end_ && !find_row()) return;
      prefetch(at_);
    }
  }
  bool find_row() {
    if (rows_left_ > 0) {
      next_row_of_chunk();
      return true;
    }
    while (row_ >= end_row_) {
      if (source_ == next_) {
        source_ = nullptr;  // no row is left
        at_ = end_ = nullptr;
        return false;
      }
      source_ = next_;
      row_ = 0;
      end_row_ = std::min(rows_of(*next_), ahead_);
    }
    at_ = source_->row(heads_.first + head_, row_);
    end_ = at_ + source_->bytes;
    const bool has_adjacent_heads = source_->stride_h == source_->bytes;
    if (has_adjacent_heads) end_ = at_ + heads_.count * source_->bytes;  // as one row
    if (has_adjacent_heads || heads_.count == 1) {
      rows_left_ = std::min(kChunkRows - 1 - row_ % kChunkRows, end_row_ - row_ - 1);
      row_ += 1 + rows_left_;
      row_bytes_ = end_ - at_;
      if (source_->stride == row_bytes_) {  // the rest of the chunk is as one row
        end_ += rows_left_ * row_bytes_;
        rows_left_ = 0;
        // The next chunk often follows. A CPU's own prefetch does not cross a page, so this starts it there.
        for (int64_t n = 0; n < 3; ++n) prefetch(end_ + n * kLine);
      }
    } else if (++head_ == heads_.count) {
      head_ = 0;
      ++row_;
    }
    return true;
  }

  HeadRange heads_{};
  const TileSource *source_ = nullptr, *next_ = nullptr;
  int log2_parts_ = 0;
  int64_t due_ = 0;  // the caller's lines that are less than a line to prefetch
  int64_t ahead_ = 0;
  bool into_l1_ = false;
  int64_t row_ = 0, end_row_ = 0, head_ = 0;
  int64_t rows_left_ = 0, row_bytes_ = 0;  // of the current chunk, if its heads are one or adjacent
  const char *at_ = nullptr, *end_ = nullptr;
};

// Returns whether all rows of a head have the same scale.
inline bool is_constant(const AttentionParams& p, const CacheScale& scale) {
  return scale && scale.stride_s == 0 && (!p.varlen.cache.pages || scale.stride_b == 0);
}

// Loads the factors of the 8-bit rows of a tile, one per key, up to `ld` lanes. Returns whether the factors may be
// applied to scores or probabilities instead of rows. It returns false if a factor is not finite, because a masked row
// must stay masked.
template <class T>
bool load_factors(const AttentionParams& p, const CacheScale& scale, int64_t h_kv, int64_t j0, int64_t keys,
                  int64_t ld, T* factors) {
  if (!scale) return false;
  const CacheParams& cache = p.varlen.cache;
  const int64_t first = p.varlen.first_k + j0, size = cache.pages ? cache.pages.page_size : int64_t{1} << 62;
  std::fill(factors, factors + ld, T(1));
  T probe = 0;
  for (int64_t n = 0; n < keys;) {
    const int64_t row = first + n, in_page = row % size, end = std::min(keys, n + size - in_page);
    const int64_t page = cache.pages ? cache.pages.page_of(row) : cache.cache;
    if (scale.stride_s == 0) {  // one factor for all rows
      const T factor = static_cast<T>(scale.at(page, h_kv, 0));
      std::fill(factors + n, factors + end, factor);
      probe += factor * T(0);
      n = end;
      continue;
    }
    for (int64_t r = in_page; n < end; ++n, ++r) {
      factors[n] = static_cast<T>(scale.at(page, h_kv, r));
      probe += factors[n] * T(0);
    }
  }
  return probe == T(0);
}

// Returns rows [first, first + count) of the tile that begins at key j0, in place or copied. If `multiplied`, the
// factors are applied to the scores or probabilities, not here.
template <class In>
Rows<In> tile_rows(const AttentionParams& p, const Tensor4& t, const CacheScale& scale,
                   const TileSource& source, bool multiplied, int64_t b, int64_t h_kv, int64_t j0,
                   int64_t first, int64_t count, int64_t cols, In* copy) {
  const CacheParams& cache = p.varlen.cache;
  const CacheDType dtype = cache.dtype;
  if (source.known && dtype == CacheDType::kInt4) {
    const int64_t row = p.varlen.first_k + j0 + first, size = cache.pages.page_size;
    copy_nibble_rows(copy, reinterpret_cast<const uint8_t*>(source.row(h_kv, first)), source.stride, count,
                     cols, groups_of(p, t), cache.pages ? cache.pages.page_of(row) : cache.cache, h_kv,
                     cache.pages ? row % size : row);
    return {copy, cols, cols};
  }
  if (!source.known || dtype == CacheDType::kLatent || dtype == CacheDType::kInt4 ||
      (dtype != CacheDType::kOfQuery && scale && !multiplied))
    return rows_of_tile<In>(p, t, multiplied ? CacheScale{} : scale, b, h_kv, j0 + first, count, cols, copy,
                            cols);
  if (dtype == CacheDType::kOfQuery)
    return {reinterpret_cast<const In*>(source.row(h_kv, first)), t.stride_s, cols};
  for_cache_dtype(dtype, [&](auto coded) {
    // A chunk is contiguous: its rows have one distance.
    copy_coded_rows<coded.value>(copy, cols, reinterpret_cast<const uint8_t*>(source.row(h_kv, first)),
                                 source.stride, count, cols);
  });
  return {copy, cols, cols};
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
