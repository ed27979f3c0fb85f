// The products of a tile (decode_tile-inl.h) with keys and values of 8 and 4 bits that are not converted before. Few rows have columns
// as lanes (decode_bytes-inl.h, decode_nibbles-inl.h, decode_float8-inl.h). More rows of int8 and int4 are lanes
// (decode_integer_lanes-inl.h).
#pragma once

#include "decode_form-inl.h"

template <class In, class T>
struct DecodeTile;

template <class In, class T>
struct IntegerProducts {
  const DecodeTile<In, T>& t;

  // Each function loads the factors of head n's keys or values. It returns whether they multiply scores or probabilities,
  // instead of rows.
  bool load_key_factors(int64_t n) const {
    T* factors = t.s.key_factors + n * t.padded_keys;
    if constexpr (DecodeNibbles::kExists<In>)
      if (t.form.is_int4)
        return t.s.nibbles.keys_of(t.slot + n)
            .load_tile(t.p, t.cache.k_groups, t.heads.first + n, t.j0, t.keys);
    if constexpr (kUsesIntegerLanes<In> && LaneIntegers::kHasGroups)
      if (t.form.has_key_groups)
        return t.s.integer_lanes.nibbles.load_numbers_of_keys(t.p, t.slot + n, t.heads.first + n, t.j0,
                                                              t.keys);
    if constexpr (kUsesIntegerLanes<In>)
      if (t.cache.dtype == CacheDType::kInt4 && t.form.has_integer_lanes)
        return load_scales(t.p, t.cache.k_groups, t.heads.first + n, t.j0, t.keys, t.padded_keys, factors);
    return load_factors<T>(t.p, t.cache.k_scale, t.heads.first + n, t.j0, t.keys, t.padded_keys, factors);
  }
  bool load_value_factors(int64_t n) const {
    T* factors = t.s.value_factors + n * t.padded_keys;
    if constexpr (DecodeNibbles::kExists<In>)
      if (t.form.is_int4) return t.s.nibbles.load_values(t.p, t.heads.first + n, t.j0, t.keys);
    if constexpr (kUsesIntegerLanes<In> && LaneIntegers::kHasGroups)
      if (t.form.has_value_groups)
        return t.s.integer_lanes.nibbles.load_numbers_of_values(t.p, n, t.heads.first + n, t.j0, t.keys);
    if constexpr (kUsesIntegerLanes<In>)
      if (t.cache.dtype == CacheDType::kInt4 && t.form.has_integer_values)
        return load_scales(t.p, t.cache.v_groups, t.heads.first + n, t.j0, t.keys, t.padded_keys, factors);
    return load_factors<T>(t.p, t.cache.v_scale, t.heads.first + n, t.j0, t.keys, t.padded_keys, factors);
  }

  // Whether this struct multiplies head n's keys or values: few rows, or rows as lanes. The factors must be loaded before.
  bool multiplies_few_rows(int64_t n, const CacheScale& scale) const {
    if (t.form.is_int8 || t.form.is_float8) return !scale || t.s.multiplied[n];
    return t.form.is_int4 && t.s.multiplied[n];
  }
  bool multiplies_lanes(int64_t n, const CacheScale& scale) const {
    return t.form.has_integer_lanes && (t.s.multiplied[n] || (t.cache.dtype == CacheDType::kInt8 && !scale));
  }

  // S of few rows for `count` keys from key j of the tile on, without the units of q.
  FA_INLINE void load_scores(int64_t n, const TileSource& source, int64_t j, int64_t count,
                             Prefetcher& ahead) const {
    Prefetcher nothing;
    const int64_t first_row = (t.slot + n) * t.rows;
    T* scores = t.scores_of(n) + j;
    if constexpr (DecodeFloat8::kExists<T>)
      if (t.form.is_float8) {
        const Rows<int8_t> k = rows_of(t.p.k, source, n, j, count, t.z.head_dim, t.s.float8.copy);
        return t.s.float8.scores(t.slot + n, t.rows, k, count, scores, t.ld, t.ld - j, ahead);
      }
    if constexpr (DecodeNibbles::kExists<In>) {
      if (t.form.is_int4) {
        const Rows<uint8_t> k = nibble_rows(t.p.k, source, n, j, count, t.z.head_dim);
        const TileGroups groups = t.s.nibbles.keys_of(t.slot + n).from(j, t.s.nibbles.of_key.count);
        return for_each_few_rows<T>(t.rows, [&](int64_t row, auto few) {
          t.s.nibbles.template scores<few.value>(first_row + row, k, groups, count, t.s.products.scale,
                                                 scores + row * t.ld, t.ld, t.ld - j,
                                                 row == 0 ? ahead : nothing);
        });
      }
    }
    if constexpr (DecodeBytes<In>::kExists) {
      const Rows<int8_t> k = rows_of(t.p.k, source, n, j, count, t.z.head_dim, t.s.bytes.copy);
      for_each_few_rows<T>(t.rows, [&](int64_t row, auto few) {
        t.s.bytes.template scores<few.value>(first_row + row, k, count, t.s.products.scale,
                                             scores + row * t.ld, t.ld, t.ld - j, row == 0 ? ahead : nothing);
      });
    }
  }
  // S of head n times the units of q.
  void multiply_units_of_queries(int64_t n) const {
    for (int64_t row = 0; row < t.rows; ++row) {
      T* scores = t.scores_of(n) + row * t.ld;
      if constexpr (DecodeNibbles::kExists<In>)
        if (t.form.is_int4) multiply_row<T>(scores, t.s.nibbles.q_units[(t.slot + n) * t.rows + row], t.ld);
      if constexpr (DecodeBytes<In>::kExists)
        if (t.form.is_int8) multiply_row<T>(scores, t.s.bytes.q_factors[(t.slot + n) * t.rows + row], t.ld);
    }
  }
  // Rounds P of head n, or multiplies it for float8.
  void finish_probs(int64_t n) const {
    if constexpr (DecodeFloat8::kExists<T>)
      if (t.form.is_float8) return t.s.float8.finish_probs(t.scores_of(n), t.rows * t.ld);
    if constexpr (DecodeNibbles::kExists<In>)
      if (t.form.is_int4) t.s.nibbles.finish_probs(n * t.rows, t.rows, t.s.scores, t.ld);
    if constexpr (DecodeBytes<In>::kExists)
      if (t.form.is_int8) t.s.bytes.finish_probs(n * t.rows, t.rows, t.s.scores, t.ld);
  }
  // Adds P V of `count` values from key j of the tile on to sums: int32, or float32 for float8. The sums of int8 and float8 are in the
  // memory of sums_of(n).
  FA_INLINE void add_chunk(int64_t n, const TileSource& source, int64_t j, int64_t count,
                           Prefetcher& ahead) const {
    Prefetcher nothing;
    const int64_t first_row = n * t.rows;
    if constexpr (DecodeFloat8::kExists<T>)
      if (t.form.is_float8) {
        const Rows<int8_t> v = rows_of(t.p.v, source, n, j, count, t.z.head_dim_v, t.s.float8.copy);
        if (j == 0) std::fill(t.sums_of(n), t.sums_of(n) + t.rows * t.d_v, T(0));
        return t.s.float8.add_values(t.scores_of(n) + j, t.ld, t.rows, v, count, t.sums_of(n), t.d_v, ahead);
      }
    if constexpr (DecodeNibbles::kExists<In>) {
      if (t.form.is_int4) {
        const Rows<uint8_t> v = nibble_rows(t.p.v, source, n, j, count, t.z.head_dim_v);
        if (j == 0) t.s.nibbles.clear_sums(first_row, t.rows);
        return for_each_few_rows<T>(t.rows, [&](int64_t row, auto few) {
          t.s.nibbles.template add_values<few.value>(first_row + row, j, v, count,
                                                     row == 0 ? ahead : nothing);
        });
      }
    }
    if constexpr (DecodeBytes<In>::kExists) {
      const Rows<int8_t> v = rows_of(t.p.v, source, n, j, count, t.z.head_dim_v, t.s.bytes.copy);
      auto* sums = reinterpret_cast<int32_t*>(t.sums_of(n));
      if (j == 0) std::fill(sums, sums + t.rows * t.d_v, 0);
      for_each_few_rows<T>(t.rows, [&](int64_t row, auto few) {
        t.s.bytes.template add_values<few.value>(first_row + row, j, t.ld, v, count, sums + row * t.d_v,
                                                 t.d_v, row == 0 ? ahead : nothing);
      });
    }
  }
  // O += the sums of head n, times the units of P or the power of two of float8.
  void add_sums(int64_t n, T* out) const {
    for (int64_t row = 0; row < t.rows; ++row, out += t.d_v) {
      if constexpr (DecodeFloat8::kExists<T>)
        if (t.form.is_float8)
          t.s.float8.add_sums(t.sums_of(n) + row * t.d_v, row, t.rows, out, t.z.head_dim_v);
      if constexpr (DecodeNibbles::kExists<In>)
        if (t.form.is_int4) t.s.nibbles.add_sums(n * t.rows + row, out, t.z.head_dim_v);
      if constexpr (DecodeBytes<In>::kExists)
        if (t.form.is_int8)
          t.s.bytes.add_sums(n * t.rows + row, reinterpret_cast<const int32_t*>(t.sums_of(n)) + row * t.d_v,
                             out, t.d_v);
    }
  }

  // factor * S or S^T with rows as lanes, for `count` keys from key j of the tile on.
  void load_lane_scores(int64_t n, const TileSource& source, int64_t j, int64_t count, T factor,
                        Prefetcher& ahead) const {
    if constexpr (kUsesIntegerLanes<In>) {
      const Rows<int8_t> k =
          rows_of(t.p.k, source, n, j, count, t.s.integer_lanes.key_bytes, t.s.integer_lanes.copy);
      t.load_lane_scores(n, j, count, [&](const LaneTile<T>& to, int64_t first) {
        t.s.integer_lanes.load_scores(t.slot + n, t.rows, k, j, count, factor, to, first, ahead);
      });
    }
  }
  // O += P V with rows as lanes, for `count` values from key `first` of the tile on.
  void add_lane_values(int64_t n, const TileSource& source, int64_t first, int64_t count,
                       const SplitResult<T>& r, Prefetcher& ahead) const {
    if constexpr (kUsesIntegerLanes<In>) {
      Rows<int8_t> v[kTileChunks];
      for (int64_t j = 0; j < count; j += kChunkRows)
        v[j / kChunkRows] = rows_of(t.p.v, source, n, first + j, std::min(kChunkRows, count - j),
                                    t.s.integer_lanes.value_bytes,
                                    t.s.integer_lanes.copy + j * t.s.integer_lanes.value_bytes);
      t.s.integer_lanes.add_values(t.s.products.many,
                                   {t.scores_of(n), t.stays_transposed ? t.lanes : t.ld, t.stays_transposed,
                                    nullptr, first, t.padded_keys},
                                   t.value_factor(n), value_factors(n, first), t.rows, v, count, r.out, t.d_v,
                                   ahead);
    }
  }

 private:
  // The factors of values from key `first` of the tile on. P that is not transposed is already multiplied by factors of keys.
  ValueFactors value_factors(int64_t n, int64_t first) const {
    if constexpr (LaneIntegers::kHasGroups)
      if (t.form.has_value_groups) return t.s.integer_lanes.nibbles.factors_of_values(n, first);
    const bool is_each_key =
        t.s.multiplied[n] && t.stays_transposed && !t.has_constant_factor(t.cache.v_scale);
    return {is_each_key ? t.s.value_factors + n * t.padded_keys + first : nullptr};
  }
  // Rows of `bytes` bytes, the first of key j of the tile.
  Rows<int8_t> rows_of(const Tensor4& cache, const TileSource& source, int64_t n, int64_t j, int64_t count,
                       int64_t bytes, int8_t* copy) const {
    return byte_rows(t.p, cache, source, t.heads.first + n, t.j0, j, count, bytes, copy);
  }
  Rows<uint8_t> nibble_rows(const Tensor4& cache, const TileSource& source, int64_t n, int64_t j,
                            int64_t count, int64_t cols) const {
    const Rows<int8_t> rows = rows_of(cache, source, n, j, count, cols / 2, t.s.nibbles.copy);
    return {reinterpret_cast<const uint8_t*>(rows.data), rows.stride, cols};
  }
};
