// Appends new keys and values to caches. It rotates keys and queries, and rounds keys and values for caches of 8 or 4 bits.
//
// A task processes a few rows of q, or of k and v. ops/checks has checked every cache position.
#pragma once

#include "cache_rows-inl.h"

constexpr int64_t kAppendRows = 4;      // rows per task
constexpr int64_t kMostColumns = 1024;  // ops/dense/attention.h: kMaxHeadDim

// Rounds x to float8, ties to even, and returns the 8 bits. A value beyond the largest float8 becomes the largest.
inline uint8_t float8_of(float x, int mantissa_bits, int least_exponent, float largest) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  if (x != x) return sign | 0x7f;
  const float magnitude = std::min(std::abs(x), largest);
  std::memcpy(&bits, &magnitude, sizeof(bits));
  const int exponent = std::max(static_cast<int>(bits >> 23) - 127, least_exponent);
  // Counts in units of the last mantissa bit. Below the smallest normal number there are 2^mantissa_bits of them.
  const auto units =
      static_cast<uint8_t>(std::nearbyint(__builtin_ldexpf(magnitude, mantissa_bits - exponent)));
  return sign | static_cast<uint8_t>(((exponent - least_exponent) << mantissa_bits) + units);
}

inline uint8_t coded(float x, CacheDType dtype) {
  switch (dtype) {
    case CacheDType::kFloat8E4M3: return float8_of(x, 3, -6, 448.0f);
    case CacheDType::kFloat8E5M2: return float8_of(x, 2, -14, 57344.0f);
    default: break;
  }
  const float rounded = std::nearbyint(x);  // int8 has no NaN: NaN becomes 0
  return static_cast<uint8_t>(
      static_cast<int8_t>(rounded != rounded ? 0 : std::clamp(rounded, -128.0f, 127.0f)));
}

// Rounds x to the type of a row of scales or zero points, stores it there, and returns it.
inline float store_number(const NumberRow& row, int64_t n, float x) {
  if (row.is_float16)
    store_tail_as<Float16, float>(static_cast<Float16*>(const_cast<void*>(row.data)) + n, splat(x), 1);
  else
    static_cast<float*>(const_cast<void*>(row.data))[n] = x;
  return row.at(n);
}

// Rounds a row to int4, and stores its scales and zero points. The results have the same bits as
// flash_attn_ext/int4.py, which defines the format.
inline void store_nibbles(const float* x, int64_t cols, const CacheGroups& groups, int64_t b, int64_t h,
                          int64_t s, uint8_t* to) {
  const NumberRow scales = number_row(groups.scales, groups.is_float16, b, h, s),
                  zeros = number_row(groups.zeros, groups.is_float16, b, h, s);
  std::fill(to, to + cols / 2, uint8_t{0});
  for (int64_t n = 0; n < groups.count; ++n) {
    const int64_t begin = n * groups.columns, end = begin + groups.columns;
    float low = x[begin], high = x[begin];
    for (int64_t c = begin; c < end; ++c) {  // a NaN stays
      low = x[c] < low || x[c] != x[c] ? x[c] : low;
      high = x[c] > high || x[c] != x[c] ? x[c] : high;
    }
    float scale, zero = kInt4Zero;
    if (groups.zeros) {
      const float range = (high - low) / 15.0f, least = std::max(std::abs(low), std::abs(high)) / 1024.0f;
      scale = store_number(scales, n, range != range ? range : std::max(range, least));
      zero = store_number(zeros, n, scale == 0 ? 0.0f : -low / scale);
    } else {
      scale = store_number(scales, n, (high > -low ? high : low) / -8.0f);
    }
    for (int64_t c = begin; c < end; ++c) {
      const float rounded = std::nearbyint(x[c] / scale + zero);
      const int nibble = rounded != rounded ? 0 : static_cast<int>(std::clamp(rounded, 0.0f, 15.0f));
      to[c / 2] |= static_cast<uint8_t>(nibble << (c % 2 * 4));
    }
  }
}

// Rotates the row of one head: reads `from` and writes `to`.
template <class T>
struct RotaryRow {
  T cos[kMostColumns / 2], sin[kMostColumns / 2];

  template <class In>
  void load_table(T* to, const void* table, int64_t stride, bool is_float32, int64_t position,
                  int64_t pairs) {
    for (int64_t c = 0; c < pairs; ++c)
      to[c] = is_float32 ? scalar_as<T>(static_cast<const float*>(table)[position * stride + c])
                         : scalar_as<T>(static_cast<const In*>(table)[position * stride + c]);
  }
  template <class In>
  void load(const RotaryParams& r, int64_t position) {
    load_table<In>(cos, r.cos, r.cos_stride, r.cos_is_float32, position, r.pairs);
    load_table<In>(sin, r.sin, r.sin_stride, r.sin_is_float32, position, r.pairs);
  }

  void rotate(const RotaryParams& r, T* x) const {
    const int64_t step = r.interleaved ? 2 : 1, other = r.interleaved ? 1 : r.pairs;
    for (int64_t c = 0; c < r.pairs; ++c) {
      T &a = x[c * step], &b = x[c * step + other];
      const T rotated = a * cos[c] - b * sin[c];
      b = a * sin[c] + b * cos[c];
      a = rotated;
    }
  }
};

template <class T, class In>
inline void widen_row(const In* from, int64_t cols, T* to) {
  for (int64_t c = 0; c < cols; c += kLanes<T>) store<T>(to + c, load_columns<T>(from + c, cols - c));
}

template <class In, class T>
struct AppendRows {
  const AppendParams& p;

  // Finds the sequence that contains `row`.
  int64_t sequence_of(const Offsets& cu_seqlens, int64_t row) const {
    int64_t low = 0, high = p.sizes.batch;  // cu_seqlens[low] <= row < cu_seqlens[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (cu_seqlens[middle] <= row ? low : high) = middle;
    }
    return low;
  }

  void query(int64_t row) const {
    const int64_t b = sequence_of(p.cu_seqlens_q, row), cols = p.sizes.head_dim;
    RotaryRow<T> rotary;
    rotary.template load<In>(p.rotary,
                             p.first_position(b) + (p.advance_query_positions ? row - p.cu_seqlens_q[b] : 0));
    for (int64_t h = 0; h < p.sizes.heads; ++h)
      turn_to(rotary, p.q.row<In>(0, h, row), p.q_out.row<In>(0, h, row), cols);
  }

  void key_and_value(int64_t row) const {
    const int64_t b = sequence_of(p.cu_seqlens_new, row), index = row - p.cu_seqlens_new[b];
    const int64_t at = p.cache_seqlens[b] + index;
    PageTable pages = p.cache.pages;
    pages.sequence = b;
    const int64_t cache = pages ? pages.page_of(at) : p.cache.batch_idx ? p.cache.batch_idx[b] : b;
    const int64_t cache_row = pages ? at % pages.page_size : at;
    RotaryRow<T> rotary;
    if (p.rotary) rotary.template load<In>(p.rotary, p.first_position(b) + index);
    for (int64_t h = 0; h < p.sizes.heads_kv; ++h) {
      store_row_in(p.k_cache, p.cache.k_scale, cache, h, cache_row, p.k.row<In>(0, h, row), p.sizes.head_dim,
                   p.rotary ? &rotary : nullptr, p.cache.k_groups);
      store_row_in(p.v_cache, p.cache.v_scale, cache, h, cache_row, p.v.row<In>(0, h, row),
                   p.sizes.head_dim_v, nullptr, p.cache.v_groups);
    }
  }

 private:
  void turn_to(const RotaryRow<T>& rotary, const In* from, In* to, int64_t cols) const {
    T x[kMostColumns];
    widen_row<T>(from, cols, x);
    rotary.rotate(p.rotary, x);
    store_row<In, T>(to, x, cols, T(1));
  }

  void store_row_in(const Tensor4& to, const CacheScale& scale, int64_t cache, int64_t h, int64_t row,
                    const In* from, int64_t cols, const RotaryRow<T>* rotary,
                    const CacheGroups& groups) const {
    if (p.cache.dtype == CacheDType::kOfQuery) {
      In* place = to.row<In>(cache, h, row);
      if (rotary) return turn_to(*rotary, from, place, cols);
      std::memcpy(place, from, cols * sizeof(In));
      return;
    }
    In turned[kMostColumns];
    if (rotary) {  // first rounds to the dtype of keys, because a key has this dtype
      turn_to(*rotary, from, turned, cols);
      from = turned;
    }
    T x[kMostColumns];
    widen_row<T>(from, cols, x);
    uint8_t* place = to.row<uint8_t>(cache, h, row);
    if (p.cache.dtype == CacheDType::kInt4) {
      if constexpr (std::is_same_v<T, float>) return store_nibbles(x, cols, groups, cache, h, row, place);
      float narrow[kMostColumns];
      for (int64_t c = 0; c < cols; ++c) narrow[c] = static_cast<float>(x[c]);
      return store_nibbles(narrow, cols, groups, cache, h, row, place);
    }
    const float divisor = scale ? scale.at(cache, h, row) : 1.0f;
    for (int64_t c = 0; c < cols; ++c) place[c] = coded(static_cast<float>(x[c]) / divisor, p.cache.dtype);
  }
};

template <class In, class T>
void append(const AppendParams& p, const Parallel& parallel) {
  const AppendRows<In, T> rows{p};
  const int64_t query_tasks = p.rotary ? ceil_div(p.sizes.seqlen_q, kAppendRows) : 0;
  for_each_task(parallel, query_tasks + ceil_div(p.sizes.seqlen_k, kAppendRows), [&](int64_t task, int) {
    const bool of_query = task < query_tasks;
    const int64_t first = (of_query ? task : task - query_tasks) * kAppendRows;
    const int64_t end = std::min(first + kAppendRows, of_query ? p.sizes.seqlen_q : p.sizes.seqlen_k);
    for (int64_t row = first; row < end; ++row) of_query ? rows.query(row) : rows.key_and_value(row);
  });
}
