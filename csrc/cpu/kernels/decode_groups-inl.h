// The scales and zero points of int4 keys or values, for one tile of decode.
#pragma once

#include "cache_rows-inl.h"

// Scales of a tile, and products of scales and zero points. null products: the zero points are kInt4Zero. Rows have no padding,
// because padded rows of all heads need more than L2. So a vector of groups may end with numbers of the next rows.
struct TileGroups {
  float *scales, *products;  // [keys][groups]

  // Returns the groups of key `j` and of the keys after it. `count`: the numbers of a key.
  TileGroups from(int64_t j, int64_t count) const {
    return {scales + j * count, products ? products + j * count : nullptr};
  }

  // Loads `keys` rows, and each number `copies` times. Zeros follow, because a vector of groups may end with them. Returns whether
  // all numbers are finite.
  bool load_tile(const AttentionParams& p, const CacheGroups& groups, int64_t h_kv, int64_t j0, int64_t keys,
                 int64_t copies = 1) const {
    const bool is_finite = load_runs(p, groups, h_kv, j0, keys, copies);
    const TileGroups end = from(keys, groups.count * copies);
    store<float>(end.scales, F32{});
    if (products) store<float>(end.products, F32{});
    return is_finite;
  }
  // The same without zeros.
  bool load_runs(const AttentionParams& p, const CacheGroups& groups, int64_t h_kv, int64_t j0, int64_t keys,
                 int64_t copies = 1) const {
    F32 probe = {};
    for_each_cache_run(p, j0, keys, [&](int64_t first, int64_t end, int64_t page, int64_t row) {
      const auto load = [&](auto number) {
        using Number = decltype(number);
        const Number* scale = groups.scales.row<Number>(page, h_kv, row);
        const Number* zero = products ? groups.zeros.row<Number>(page, h_kv, row) : nullptr;
        const int64_t stride_scale = groups.scales.stride_s, stride_zero = groups.zeros.stride_s,
                      rows = end - first;
        const TileGroups to = from(first, groups.count * copies);
        if (groups.count == 1 && copies == 1)
          return to.load_single(scale, stride_scale, zero, stride_zero, rows);
        const auto load_some = [&](auto few) {
          return to.load_rows<few.value>(scale, stride_scale, zero, stride_zero, groups.count, rows, copies);
        };
        switch (groups.count) {
          case 1: return load_some(std::integral_constant<int, 1>{});
          case 2: return load_some(std::integral_constant<int, 2>{});
          case 4: return load_some(std::integral_constant<int, 4>{});
          default: return load_some(std::integral_constant<int, 0>{});
        }
      };
      probe += groups.is_float16 ? load(Float16{}) : load(0.0f);
    });
    return sum_lanes<float>(probe) == 0.0f;
  }

  // Copies `keys` rows of `count` groups to columns: to[0][g][j] = scale, to[1][g][j] = product, at distances `ld` of groups. The
  // keys from `keys` to `whole` become 0. `whole` and `ld`: whole vectors.
  void transpose_rows(int64_t count, int64_t keys, int64_t whole, float* to, int64_t ld) const {
    constexpr int L = kLanes<float>;
    for (const float* from : {scales, products}) {
      for (int64_t j = 0; from && j < whole; j += L)
        for (int64_t g = 0; g < count; g += L) {
          F32 square[L];
#pragma GCC unroll 16
          for (int n = 0; n < L; ++n)
            square[n] = j + n < keys ? load<float>(from + (j + n) * count + g) : F32{};
          transpose<float>(square);
#pragma GCC unroll 16
          for (int n = 0; n < L; ++n)
            if (g + n < count) store<float>(to + (g + n) * ld + j, square[n]);
        }
      to += count * ld;
    }
  }

 private:
  // As load_rows(), for rows of one number.
  template <class Number>
  F32 load_single(const Number* scale, int64_t stride_scale, const Number* zero, int64_t stride_zero,
                  int64_t rows) const {
    // The numbers of rows that are apart first: a vector load would wait for stores of its parts.
    Number copies[kMostDecodeKeys];
    F32 probe = {};
    const auto load = [&](const Number* row, int64_t stride, float* to, const float* factors) {
      const Number* run = stride == 1 ? row : copies;
      if (stride != 1)
        for (int64_t n = 0; n < rows; ++n, row += stride) copies[n] = *row;
      for (int64_t n = 0; n < rows; n += kLanes<float>) {
        F32 numbers = load_columns<float>(run + n, rows - n);
        if (factors) numbers *= load_columns<float>(factors + n, rows - n);
        store_columns<float>(to + n, numbers, rows - n);
        probe += numbers * 0.0f;
      }
    };
    load(scale, stride_scale, scales, nullptr);
    if (zero) load(zero, stride_zero, products, scales);
    return probe;
  }
  // Loads rows from `scale` and `zero` on. Returns 0 in all lanes if all numbers are finite. kCount: the numbers of a row; 0: `count`.
  template <int kCount, class Number>
  F32 load_rows(const Number* scale, int64_t stride_scale, const Number* zero, int64_t stride_zero,
                int64_t count, int64_t rows, int64_t copies) const {
    constexpr int64_t kRowsAhead = 16;  // numbers of a head are far apart; no other loop prefetches them
    float *scale_to = scales, *product_to = products;
    const auto load = [&](const Number* from, int64_t n) FA_INLINE_LAMBDA {
      if constexpr (kCount > 0) return load_few_numbers<kCount>(from);
      return load_columns<float>(from, n);
    };
    F32 probe = {};
    for (int64_t n = 0; n < rows; ++n, scale += stride_scale, scale_to += count * copies) {
      __builtin_prefetch(scale + kRowsAhead * stride_scale, 0, kPrefetchIntoL1);
      if (zero) __builtin_prefetch(zero + kRowsAhead * stride_zero, 0, kPrefetchIntoL1);
      for (int64_t g = 0; g < (kCount > 0 ? kCount : count); g += kLanes<float>) {
        const F32 numbers = load(scale + g, count - g);
        store_copies(scale_to + g * copies, numbers, count - g, copies);
        probe += numbers * 0.0f;
        if (!zero) continue;
        const F32 product = numbers * load(zero + g, count - g);
        store_copies(product_to + g * copies, product, count - g, copies);
        probe += product * 0.0f;
      }
      if (zero) zero += stride_zero, product_to += count * copies;
    }
    return probe;
  }
  // Stores each of `count` numbers `copies` times. Each vector overwrites the padding of the vector before it.
  FA_INLINE static void store_copies(float* to, F32 numbers, int64_t count, int64_t copies) {
    copies == 1 ? store<float>(to, numbers) : repeat_numbers(to, numbers, count, copies);
  }
  // A function, because a vector whose lanes are numbered at run time is in memory.
  FA_NOINLINE static void repeat_numbers(float* to, F32 numbers, int64_t count, int64_t copies) {
    constexpr int64_t L = kLanes<float>;
    for (int64_t n = 0; n < std::min(count, L); ++n, to += copies)
      for (int64_t i = 0; i < copies; i += L) store<float>(to + i, splat<float>(numbers[n]));
  }
};
