// How the products of a tile of decode run: the form for the tile's rows and the type of the cache, and the parts of K and V
// that a product reads at once.
#pragma once

#include "decode_scratch-inl.h"

// Returns whether the products of `rows` rows run on panels (decode_many_rows-inl.h), which may be on tile registers.
template <class In, class T>
bool multiplies_panels(const AttentionParams& p, int64_t rows) {
  const CacheDType dtype = p.varlen.cache.dtype;
  return fills_lanes<T>(rows) && !uses_lane_blocks<T>(rows) &&
         !(dtype == CacheDType::kInt4 && multiplies_nibbles<In, T>(p, rows)) &&
         !(dtype == CacheDType::kInt8 && multiplies_bytes<T>(p, rows));
}

template <class In, class T>
struct DecodeForm {
  const AttentionParams& p;
  int64_t rows, keys;  // of the tile

  using Operands = ManyRowsOperands<In, T>;
  const Sizes& z = p.sizes;
  const CacheDType dtype = p.varlen.cache.dtype;
#if defined(FA_FEW_ROWS)  // only tiles of multiplies_panels()
  static constexpr bool is_int8 = false, is_int4 = false, is_float8 = false, all_at_once = true;
#else
  const bool is_int8 = DecodeBytes<In>::kExists && dtype == CacheDType::kInt8 && multiplies_bytes<T>(p, rows);
  const bool is_int4 =
      DecodeNibbles::kExists<In> && dtype == CacheDType::kInt4 && multiplies_nibbles<In, T>(p, rows);
  const bool is_float8 = DecodeFloat8::kExists<T> && DecodeFloat8::multiplies(p, rows);
  const bool all_at_once = fills_lanes<T>(rows) && !is_int8 && !is_int4 && !is_float8;
#endif
  const bool has_blocks = all_at_once && uses_lane_blocks<T>(rows), is_panel = all_at_once && !has_blocks;
  // Whether decode_integer_lanes-inl.h has a form for the rows, and whether for their product with V.
  const bool has_integer_lanes = kUsesIntegerLanes<In> && all_at_once && multiplies_integer_lanes(p, rows);
  const bool has_integer_values = has_integer_lanes && multiplies_integer_values(p, rows);
  // Whether these forms also multiply by the scales of groups of int4.
  const bool has_key_groups = has_groups(has_integer_lanes, p.varlen.cache.k_groups);
  const bool has_value_groups = has_groups(has_integer_values, p.varlen.cache.v_groups);

  // Blocks of lanes read each row of K once for each block of Q's rows, and each row of V once for each group of rows.
  bool reads_keys_again() const { return has_blocks && !reads_keys_once<In, T>(rows); }
  bool reads_values_again() const { return has_blocks && readings_of_values() > 1; }
  // Returns how many groups of rows read each row of V.
  int64_t readings_of_values() const {
    const int64_t several = has_integer_values ? 0 : lanes_added_together<In, T>(rows);
    int64_t readings = readings_of_several_vectors<T>(several);
    for (int64_t first = several, block; first < rows; first += block) {
      block = rows_of_block<In, T>(rows - first);
      if (joins_values<T>(rows - first - block, rows) && !has_integer_values) block = rows - first;
      readings += ceil_div(block, rows_of_group(block));
    }
    return readings;
  }
  // Whether V is copied part by part. Otherwise far rows that are read several times would push each other out of L1. With 4
  // to 16 key heads in a row of memory, 16 to 64 rows of Q take 0.64 to 0.97 of the time (Zen 5).
  bool copies_values(const TileSource& values) const {
    // Several vectors read 4 or 6 columns of all rows in turn. They have copies of 16 bits.
    const bool is_read_again = adds_several_vectors() ? std::is_same_v<In, T> : reads_values_again();
    return is_own_type() && values.known && is_read_again && are_far_rows(values.stride);
  }
  bool is_in_one_place(const TileSource& source) const { return is_own_type() && source.in_one_place; }

  // A product of keys counts lines of its elements. The prefetcher divides the number by 2 to this power. Several products that
  // read the same rows prefetch a part each, because many prefetches at once wait for each other. With parts, 8 to 16 rows
  // of float32 take 0.75 to 0.89 of the time on AVX2 (Zen 3, memory).
  int log2_of_key_lines() const {
    const bool has_two_parts =
        reads_keys_again() && !(kHasSumsOfColumns && kReadsKeysInPlace<In, T>) && widening() == 0;
    const bool is_widened = has_blocks && !has_integer_lanes && widens_keys_once<In, T>(rows);
    return (has_integer_lanes ? 0 : widening()) + has_two_parts + is_widened;
  }
  int log2_of_value_lines() const {
    const int wider = has_integer_values ? 0 : widening();
    if (!reads_values_again()) return wider;
    // More parts would be less than a cache line, and lines() is slow for less than a line.
    return wider + std::clamp(2 - wider, 0, readings_of_values() > 3 ? 2 : 1);
  }

  // Returns how many keys are multiplied at once for each of `heads` heads.
  int64_t key_step(int64_t heads) const {
    if (kHasVectorsOfRows && has_blocks && !converts_rows()) return key_step_of_avx2(heads);
    // Panels: one product of the whole tile reads each panel of Q^T once. Otherwise a step stays in L1 in three cases: a chunk is
    // a copy of widened keys, several blocks of lanes read each key, or several heads take turns.
    const bool copies_keys =
        Operands::kWidensKeys && !(kHasSumsOfColumns && reads_all_keys_in_place<In, T>(rows));
    if (has_blocks && copies_keys && !kHasVectorsOfRows) return kChunkRows;
    if (heads == 1 && has_integer_columns()) return keys;
    if (converts_rows() || is_float8) return coded_rows_at_once(heads * z.head_dim);
    return reads_keys_again() || (heads > 1 && !is_panel) ? rows_in_l1(heads * z.head_dim) : keys;
  }
  // Returns the keys whose values are multiplied at once. Their sums are added to O, so the bits of a result depend on it.
  int64_t value_step() const {
    if (dtype != CacheDType::kOfQuery && has_blocks) return kConvertedRows;
    // Several vectors: 32 rows, so that a copy stays in L1. float32 in place has about the same time with 64 rows.
    if (adds_several_vectors()) return rows_in_l1(z.head_dim_v, (4 << 10) * sizeof(In));
    // AVX2: 64 rows with 128 columns, the distance of prefetches. With 8 adjacent heads in memory, 8 rows of 16 bits take 0.86 to 0.9
    // of the time of 128 rows, and 12 and 16 rows 0.86 and 0.95 (Zen 3, L2 of 512 KiB). Other layouts are equal.
    if (reads_values_again())
      return rows_in_l1(z.head_dim_v, kHasVectorsOfRows ? (8 << 10) * sizeof(In) : 32 << 10);
    // A product reads some columns of all keys, then the next columns. AVX-512: 8 rows are slow enough for a part of L2.
    if (!has_blocks || z.head_dim_v <= Operands::columns_at_once(rows)) return keys;
    if (rows < kMostValueRows || kHasVectorsOfRows) return rows_in_l1(z.head_dim_v, (4 << 10) * sizeof(In));
    return keys * z.head_dim_v * sizeof(In) > 128 << 10 ? rows_in_l1(z.head_dim_v) : keys;
  }
  // The same for rows that are not lanes. Sums of the whole tile stay in registers, if the registers hold a row.
  int64_t value_step_of_few_rows(int64_t heads) const {
    if (is_float8) return coded_rows_at_once(heads * z.head_dim_v);
    if (heads > 1) return rows_in_l1(heads * z.head_dim_v);
    return z.head_dim_v <= kDecodeValueVectors * kLanes<T> ? keys : kChunkRows;
  }
  // Returns how many rows a product may read from row `j` on, at most `most`: the rest of the run, or a chunk of a copy.
  int64_t rows_in_place(const TileSource& source, int64_t j, int64_t most) const {
    const bool is_chunk =
        most <= kChunkRows || !source.known || !(is_own_type() || converts_rows() || is_float8);
    const int64_t end = is_chunk ? j + kChunkRows : source.end_of_run(j);
    return std::min({most, end - j, keys - j});
  }
  // Whether any number of rows is converted at once. Forms without a conversion read chunks.
  bool converts_rows() const { return !is_own_type() && !reads_codes(); }
  // Whether few rows are multiplied by a cache of 8 or 4 bits without a conversion.
  bool reads_codes() const { return is_int8 || is_int4 || is_float8; }

 private:
  // key_step() for blocks of lanes on AVX2. The ratios are the time with this step divided by the time with chunks (Zen 3).
  int64_t key_step_of_avx2(int64_t heads) const {
    constexpr bool kIsWide = std::is_same_v<In, T>;
    // Many groups of 4 or 6 keys. 32 rows of 16 bits take 0.97 of the time of 48 keys.
    if (lanes_scored_together<In, T>(rows) > 0) return std::min<int64_t>(96, keys);
    if (heads > 1) {  // 0.93 to 0.98 from 7 rows on (float32: 9); 1.12 for 2 rows
      const bool has_long_turns = rows > (kIsWide ? kLanes<T> : kMostValueRows);
      return std::min(has_long_turns ? 2 * kChunkRows : kChunkRows, keys);
    }
    // A copy of widened keys, and keys that several blocks read: 0.90 to 0.98. A whole tile takes up to 1.28.
    if (reads_keys_again() || widens_keys_once<In, T>(rows))
      return rows_in_l1(z.head_dim, (8 << 10) * sizeof(In));
    return kIsWide ? kChunkRows : keys;  // 16 bits 0.93 to 0.97, float32 1.04
  }
  // Whether the keys are read once, in place (decode_integer_columns-inl.h). Calls for 64 keys take 1.03 of the time (Zen 3).
  bool has_integer_columns() const {
    return has_integer_lanes && !has_key_groups && kHasVectorsOfRows && rows <= kLanes<T> / 2;
  }
  // Whether P V of several vectors of rows is computed at once, maybe with other blocks after them.
  bool adds_several_vectors() const { return has_blocks && lanes_added_together<In, T>(rows) > 0; }
  bool has_groups(bool is_integer, const CacheGroups& groups) const {
    return LaneIntegers::kHasGroups && is_integer && dtype == CacheDType::kInt4 && has_groups_of(groups);
  }
  bool is_own_type() const { return dtype == CacheDType::kOfQuery; }
  // The products count elements of 2^widening times the bytes of the stored elements.
  int widening() const {
    if (!converts_rows()) return 0;
    return (sizeof(In) == 8 ? 3 : sizeof(In) == 4 ? 2 : 1) + (dtype == CacheDType::kInt4);
  }
  // Returns how many rows of a cache of 8 or 4 bits are converted or multiplied at once, if the rows of all heads have `cols` columns.
  int64_t coded_rows_at_once(int64_t cols) const {
    return std::min(kConvertedRows, rows_in_l1(cols, (64 << 10) * sizeof(In)));
  }
  // Returns how many of the tile's rows of K or V stay in L1, if they have `cols` columns: whole chunks.
  int64_t rows_in_l1(int64_t cols, int64_t bytes = 32 << 10) const {
    const int64_t elements = bytes / sizeof(In);
    return std::min(std::max<int64_t>(elements / cols / kChunkRows, 1) * kChunkRows, keys);
  }
};
