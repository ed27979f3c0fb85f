// How decode cuts rows of Q into blocks of lanes, and which file multiplies a block:
//
//   decode_lanes-inl.h            every block without another form
//   decode_vector_of_rows-inl.h   AVX2, AVX-512: a block that needs a whole vector
//   decode_several_vectors-inl.h  AVX2: two or three such blocks at once
//   decode_sums_of_columns-inl.h  AVX2, and AVX-512 without products of bfloat16: keys of 16 bits, and at most half a vector of rows
//                                 (float16 on AVX2: a whole one)
//
// More rows than kMostLaneBlocks vectors are not cut: decode_many_rows-inl.h multiplies them by panels.
//
// Example: 20 rows are a block of 16 with kSpan 1, and a block of 4 with kSpan 4. Two whole vectors would multiply 12
// lanes of padding.
#pragma once

#include "tiles-inl.h"

// AMX: another table's functions for few rows (run.h). This table has only decode's products on tile registers.
#if defined(FA_HAS_TILE_REGISTERS) && !defined(FA_TESTED_PASSES_ONLY)
#define FA_FEW_ROWS FA_OTHER_DTYPES->few_rows
constexpr bool kHasOnlyPanels = true;
#else
constexpr bool kHasOnlyPanels = false;
#endif

// Number of sums in registers: half of the registers. One reduction of dot_block() completes as many sums as a vector
// has lanes.
constexpr int kDotSums = FA_VECTOR_REGISTERS / 2;

// Spans of at most 16 bytes: neighbouring lanes are added by shuffles within 16 bytes.
template <class T>
constexpr int kMostSpan = std::min<int>(16 / sizeof(T), kLanes<T> / 2);

// Returns the logarithm of kSpan for `rows` rows: the largest kSpan for which a vector holds all rows.
template <class T>
constexpr int log2_span_of(int64_t rows) {
  int log2 = 0;
  while (2 << log2 <= kMostSpan<T> && rows << (log2 + 1) <= kLanes<T>) ++log2;
  return log2;
}
template <class T>
constexpr int span_of(int64_t rows) {
  return 1 << log2_span_of<T>(rows);
}

// Forms for AVX2 and for AVX-512 without dot products of bfloat16. They were measured on no other instruction set.
constexpr bool kHasVectorsOfRows = FA_VECTOR_BYTES == 32;
#if FA_VECTOR_BYTES == 64 && !defined(FA_DOT_BFLOAT16)
constexpr bool kHasSumsOfColumns = true;
#else
constexpr bool kHasSumsOfColumns = false;
#endif

// Whether decode_vector_of_rows-inl.h has a form for 9 to 12 rows. With sums of columns, blocks of 8 and 4 rows take 0.90 to 0.97
// of its time, because it needs a widened copy of the keys.
template <class In, class T>
constexpr bool kHasThreeQuarters =
    FA_VECTOR_BYTES == 64 && sizeof(T) == 4 && (!kHasSumsOfColumns || std::is_same_v<In, T>);

// Returns the number of rows in the next block. Example: 12 rows of 16 lanes are blocks of 8 and 4 rows, because
// one block would have 4 lanes of padding. The form for 9 to 12 rows has no padding. AVX2 multiplies all of them faster.
template <class In, class T>
constexpr int64_t rows_of_block(int64_t rows) {
  constexpr int64_t L = kLanes<T>, kLeast = L / kMostSpan<T>;
  if (rows >= L || kHasVectorsOfRows || kHasThreeQuarters<In, T>) return std::min(rows, L);
  return kLeast < L / 2 && rows > L / 2 && rows <= L / 2 + kLeast ? L / 2 : rows;
}

// Returns the number of rows in the last block, which has the fewest rows.
template <class In, class T>
constexpr int64_t rows_of_last_block(int64_t rows) {
  while (rows_of_block<In, T>(rows) < rows) rows -= rows_of_block<In, T>(rows);
  return rows;
}

// Returns kSpan of the last block.
template <class In, class T>
constexpr int widest_span(int64_t rows) {
  return span_of<T>(rows_of_last_block<In, T>(rows));
}

// Returns whether `rows` rows of Q are multiplied at once. The limit bounds the memory, because a caller may request
// splits for a prompt of thousands of rows.
constexpr int64_t kMostRowsAtOnce = 512;
template <class T>
constexpr bool fills_lanes(int64_t rows) {
  return rows * kMostSpan<T> > kLanes<T> / 2 && rows <= kMostRowsAtOnce;
}

// Returns the number of lanes that `rows` rows fill, if fills_lanes(): a part of a vector, or whole vectors.
template <class T>
constexpr int64_t lanes_of(int64_t rows) {
  return rows > kLanes<T> ? round_up_to_lanes<T>(rows) : kLanes<T> >> log2_span_of<T>(rows);
}

// More rows use the panels of the forward's product. Measured with AVX-512: up to 96 rows lanes take 0.66 to 1.0 of the panels'
// time on Zen 5, and about the same time on Zen 4. With 128 rows they take up to 1.06. AVX2 (Zen 3): 36 to 56 rows take 0.80 to
// 0.92, and 64 rows 0.88 to 1.03.
constexpr int kMostLaneBlocks = FA_VECTOR_BYTES == 64 ? 6 : FA_VECTOR_BYTES == 32 ? 8 : 4;

// Returns whether `rows` rows are cut into blocks. Otherwise the forward's matrix product multiplies all of them.
template <class T>
constexpr bool uses_lane_blocks(int64_t rows) {
#if defined(FA_HAS_TILE_REGISTERS)  // faster from half a vector on
  return rows <= kLanes<T> / 2;
#else
  return rows <= kMostLaneBlocks * kLanes<T>;
#endif
}

// Returns whether the last block, of `rows` rows, shares a group of rows of P V with the vector of rows before it: AVX2, and half a
// vector of rows. Example: 8 + 4 rows are two groups of 6 in place of groups of 6, 2 and 4. So 12 rows of float32 take 0.9 of the time
// (Zen 3).
template <class T>
constexpr bool joins_values(int64_t rows, int64_t all_rows) {
  return kHasVectorsOfRows && all_rows > kLanes<T> && rows > 0 && span_of<T>(rows) == 2;
}

// Returns how many lanes, from the first row on, decode_several_vectors-inl.h multiplies: at least `fewest` whole blocks, or 0. It
// does not count a last block of at most half a vector, and the vector that this block joins. Examples for 8 lanes: 16 for 13 to 18
// rows, 0 for 20, 24 for 21, 16 for 28.
template <class T>
constexpr int64_t lanes_of_several_vectors(int64_t rows, int64_t fewest) {
  if (!kHasVectorsOfRows || !uses_lane_blocks<T>(rows)) return 0;
  const int64_t full = (rows + kLanes<T> / 2 - 1) / kLanes<T>;  // blocks of more than half a vector
  const int64_t together = full - joins_values<T>(rows - full * kLanes<T>, rows);
  return together < fewest ? 0 : together * kLanes<T>;
}
// The same for S^T. Fewer rows read bfloat16 keys in place. Other keys are elements of T, or widened for any number of rows.
template <class In, class T>
constexpr int64_t lanes_scored_together(int64_t rows) {
  return lanes_of_several_vectors<T>(rows, std::is_same_v<In, BFloat16> ? 4 : 2);
}
// The same for P V. Only many rows pay for a copy of 16-bit values.
template <class In, class T>
constexpr int64_t lanes_added_together(int64_t rows) {
  return lanes_of_several_vectors<T>(rows, std::is_same_v<In, T> ? 2 : 4);
}

// Returns how many times several vectors, with `lanes` lanes, read each row of K or V.
template <class T>
constexpr int64_t readings_of_several_vectors(int64_t lanes) {
  return lanes / (2 * kLanes<T>);
}

// Calls body(first row, vectors) for two or three of these vectors at a time.
template <class T, class Body>
inline void for_several_vectors(int64_t lanes, const Body& body) {
  int64_t first = 0;
  for (; lanes - first != 3 * kLanes<T> && first < lanes; first += 2 * kLanes<T>)
    body(first, std::integral_constant<int, 2>{});
  if (first < lanes) body(first, std::integral_constant<int, 3>{});
}

// Calls body(first row, number of rows) for each block.
template <class In, class T, class Body>
inline void for_each_lane_block(int64_t rows, const Body& body) {
  for (int64_t first = 0, count; first < rows; first += count) {
    count = rows_of_block<In, T>(rows - first);
    body(first, count);
  }
}

// S^T or P^T of a tile: [blocks][keys][lanes of the block]; without blocks [keys][lanes].
template <class T>
struct LaneTile {
  T* data;
  int64_t keys;  // whole chunks

  // The element of key j and of the first row of a block. No block before it has padding.
  T* at(int64_t first_row, int64_t rows, int64_t j) const {
    return data + first_row * keys + j * lanes_of<T>(rows);
  }
};

// Whether decode_vector_of_rows-inl.h or decode_sums_of_columns-inl.h computes the scores of some blocks.
template <class In, class T>
constexpr bool kReadsKeysInPlace = kHasVectorsOfRows || (kHasSumsOfColumns && !std::is_same_v<In, T>);

// The most rows of a block of decode_sums_of_columns-inl.h. AVX2: float16 has a whole vector of rows. There a conversion takes as
// long as a multiply-add, and one conversion serves all rows.
template <class In, class T>
constexpr int64_t kMostRowsOfColumns =
    kHasVectorsOfRows && std::is_same_v<In, Float16> ? kLanes<T> : kLanes<T> / 2;

// Returns whether decode_sums_of_columns-inl.h computes the scores of a block of `rows` rows.
template <class In, class T>
constexpr bool columns_are_lanes(int64_t rows) {
  return kReadsKeysInPlace<In, T> && !std::is_same_v<In, T> && rows <= kMostRowsOfColumns<In, T>;
}

// Returns whether one of these two files computes the scores of a block of `rows` rows.
template <class In, class T>
constexpr bool reads_keys_in_place(int64_t rows) {
  if (!kReadsKeysInPlace<In, T>) return false;
  if (kHasSumsOfColumns) return columns_are_lanes<In, T>(rows);
  return span_of<T>(rows) == 1 || !std::is_same_v<In, T>;
}

// Returns whether vectors of rows multiply keys that were widened once. AVX2: several vectors do, and several blocks of float16, which
// would convert each key again. With 9 and 10 rows the copy takes longer than these conversions: without it they take 0.85 to 0.94
// of the time (Zen 3).
template <class In>
constexpr bool kMayWidenKeys = kHasVectorsOfRows && sizeof(In) == 2;
template <class In, class T>
constexpr bool widens_keys_once(int64_t rows) {
  return kMayWidenKeys<In> && ((std::is_same_v<In, Float16> && rows > kLanes<T> * 5 / 4) ||
                               lanes_scored_together<In, T>(rows) > 0);
}

// Returns whether the scores of the last block are computed together with the scores of the vector of rows before it: elements of T. A
// key is loaded once for both, and more sums hide the latency of multiply-adds.
template <class In, class T>
constexpr bool joins_vector_of_rows(int64_t rows, int64_t all_rows) {
  return joins_values<T>(rows, all_rows) && (std::is_same_v<In, T> || widens_keys_once<In, T>(all_rows));
}

// Returns whether one pass over the keys multiplies all rows.
template <class In, class T>
constexpr bool reads_keys_once(int64_t rows) {
  if (const int64_t several = lanes_scored_together<In, T>(rows); several > 0)
    return several >= rows && readings_of_several_vectors<T>(several) == 1;
  const int64_t rest = rows - rows_of_block<In, T>(rows);
  return rest == 0 || joins_vector_of_rows<In, T>(rest, rows);
}

// Returns whether they compute the scores of all blocks from keys in place. The first block has the most rows.
template <class In, class T>
constexpr bool reads_all_keys_in_place(int64_t rows) {
  const int64_t last = rows_of_last_block<In, T>(rows);
  return !widens_keys_once<In, T>(rows) && reads_keys_in_place<In, T>(rows_of_block<In, T>(rows)) &&
         (reads_keys_in_place<In, T>(last) || joins_vector_of_rows<In, T>(last, rows));
}

// Returns whether decode_vector_of_rows-inl.h computes the scores of a block of `rows` rows from elements of keys, which may be
// copies: a block that needs more than half a vector. `all_rows`: of all blocks.
template <class In, class T>
constexpr bool multiplies_vector_of_rows(int64_t rows, int64_t all_rows) {
  return (FA_VECTOR_BYTES == 64 || widens_keys_once<In, T>(all_rows)) && span_of<T>(rows) == 1;
}

// Returns whether score_lanes() computes the scores of a block of `rows` rows. If it does, it also computes each block of
// fewer rows.
template <class In, class T>
constexpr bool scores_lanes_of(int64_t rows) {
  return !reads_keys_in_place<In, T>(rows) && !multiplies_vector_of_rows<In, T>(rows, rows);
}

// Returns the number of elements of a row of Q in a block, padded for each form. Sums of columns repeat a row twice.
template <class T>
constexpr int64_t block_depth_of(int64_t depth) {
  constexpr int64_t kStep = kHasSumsOfColumns || kHasVectorsOfRows ? 2 * kLanes<T> : kLanes<T>;
  return ceil_div(depth, kStep) * kStep * (kHasSumsOfColumns ? 2 : 1);
}

// Calls body(span) with kSpan as a compile-time constant.
template <class T, class Body>
inline void for_any_span(int64_t rows, const Body& body) {
  const int span = span_of<T>(rows);
  if constexpr (kMostSpan<T> >= 4)
    if (span == 4) return body(std::integral_constant<int, 4>{});
  if constexpr (kMostSpan<T> >= 2)
    if (span == 2) return body(std::integral_constant<int, 2>{});
  body(std::integral_constant<int, 1>{});
}
// The same for blocks that are no vectors of rows.
template <class T, class Body>
inline void for_span(int64_t rows, const Body& body) {
  for_any_span<T>(rows, [&](auto span) {
    if constexpr (span.value > 1 || !kHasVectorsOfRows) body(span);
  });
}
