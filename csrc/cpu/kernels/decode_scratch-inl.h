// The size of a tile of decode, and the memory of a thread for it.
#pragma once

#include "decode_byte_lanes-inl.h"
#include "decode_bytes-inl.h"
#include "decode_float8-inl.h"
#include "decode_nibble_lanes-inl.h"
#include "decode_nibbles-inl.h"
#include "dropout_tile-inl.h"
#include "prefetcher-inl.h"

// Rows that are converted from 8 or 4 bits at once. The copy stays in L1: 16 KiB of bfloat16 with 128 columns. With 64 rows instead
// of 16, calls of 8 rows of Q take 0.92 of the time: a chunk of rows takes few instructions more than its call.
constexpr int64_t kConvertedRows = 64;

// Returns the most keys of a tile.
inline int64_t decode_block_k(const AttentionParams& p) {
  const Sizes& z = p.sizes;
  if ((p.mask && !p.varlen.cache.tree_mask) || p.functions || p.band.chunks) return kDecodeKeys;
  const Range seen = visible_keys(p.band, 0, z.seqlen_q, z.seqlen_k);
  const int64_t rows = z.heads / z.heads_kv * z.seqlen_q;
  const auto fits = [&](int64_t keys) {
    return keys <= kMostDecodeKeys && keys * rows <= kMostDecodeScores &&
           keys * kLeastDecodeTiles <= seen.end - seen.begin;
  };
  int64_t keys = rows <= kRowsOfMoreKeys ? kMoreDecodeKeys : kDecodeKeys;
  while (fits(2 * keys)) keys *= 2;
  return keys;
}

// How the keys are cut into tiles. A tile in which a key is hidden from some query costs more, so it has few other keys.
struct DecodeTiles {
  int64_t most;          // keys of a tile
  int64_t most_of_mask;  // keys of a tile with a mask: a row of a bool mask has 64 bits
  Range seen_by_all;     // the keys that every query sees
  int64_t end;           // of the keys that some query sees

  static DecodeTiles of(const AttentionParams& p) {
    const Sizes& z = p.sizes;
    const Range first = visible_keys(p.band, 0, 1, z.seqlen_k),
                last = visible_keys(p.band, z.seqlen_q - 1, z.seqlen_q, z.seqlen_k);
    const int64_t most = decode_block_k(p), first_hidden = p.mask ? p.varlen.cache.first_masked : first.end;
    return {most, p.mask ? kDecodeKeys : most, {last.begin, std::min(first.end, first_hidden)}, last.end};
  }
  // Returns the most keys of the tile that starts at key j0.
  int64_t keys_from(int64_t j0) const {
    if (j0 < seen_by_all.begin) return std::min(whole_blocks(seen_by_all.begin - j0 + kDecodeKeys - 1), most);
    if (seen_by_all.end == end) return most;
    const int64_t before_hidden = whole_blocks(seen_by_all.end - j0);
    return before_hidden > 0 ? std::min(before_hidden, most) : most_of_mask;
  }

 private:
  static int64_t whole_blocks(int64_t keys) { return keys / kDecodeKeys * kDecodeKeys; }
};

// The products of integers with rows as lanes, and whether queries of the type In use them.
#if defined(FA_DOT_BYTES)
using LaneIntegers = ByteLanes;
template <class In>
constexpr bool kUsesIntegerLanes = std::is_same_v<In, BFloat16>;
#elif defined(FA_HAS_INTEGER_LANES)
using LaneIntegers = WordsOrNibbles;
template <class In>
constexpr bool kUsesIntegerLanes = sizeof(In) == 2;  // float32 is more exact than int16
#else
struct LaneIntegers {
  static constexpr bool kHasGroups = false;
  static LaneIntegers allocate(Arena&, const AttentionParams&, int64_t, int64_t) { return {}; }
};
template <class In>
constexpr bool kUsesIntegerLanes = false;
#endif

// Scratch of one thread. `rows` counts the rows of all heads of a task.
template <class In, class T>
struct DecodeScratch {
  DecodeProducts<In, T> products;
  DecodeBytes<In> bytes;       // only if keys and values are int8
  DecodeNibbles nibbles;       // only if keys and values are int4
  LaneIntegers integer_lanes;  // only if has_integer_keys()
  DecodeFloat8 float8;         // only if keys and values are float8
  T* scores;                   // [rows][block_k]   S, then P in place; or S^T, [block_k][lanes]
  T* sums;  // [rows][D_v]       the tile's part of O, added to O as a whole. Over many tiles that rounds like a sum
            //                   of tiles, not like one chain of all keys
  MaskTile<T> mask;
  T* dropout_tile;  // [S_q][block_k]
  In* key_copy;     // [kConvertedRows][D]   only if keys come from pages or 8 bits
  In* value_copy;   // [block_k][D_v]    likewise, or if masked values may not be finite, or rows of V are far
  T* key_factors;   // [heads][block_k]  only if keys have 8 bits
  T* value_factors;
  bool* multiplied;  // [heads]   the factors multiply scores instead of keys
  bool* added;       // [heads]   the tile's values are already in the sums
  bool prefetches;   // prefetches_rows()
};

// Scratch for any sequence of the call, and for tasks of `heads` key heads.
template <class In, class T>
DecodeScratch<In, T> allocate_decode_scratch(Arena& arena, const AttentionParams& call, int64_t heads,
                                             int threads) {
  const Sizes& z = call.sizes;
  const int64_t group = z.heads / z.heads_kv;
  // is_decode() is false for a sequence with more queries than most_queries.
  const int64_t long_chunk = std::min(kDecodeMaxLongChunk, kDecodeMaxRowsOfLongChunk / group);
  const int64_t most_queries = std::max(kDecodeMaxChunk, long_chunk);
  const int64_t seqlen_q = is_decode(call, 0) ? z.seqlen_q : std::min(z.seqlen_q, most_queries);
  const int64_t rows = group * seqlen_q;
  // A packed sequence can have fewer rows than the call, and so larger tiles.
  const int64_t block_k = fitted(call.varlen ? kMostDecodeKeys : decode_block_k(call), z.seqlen_k);
  DecodeScratch<In, T> s;
  s.products = DecodeProducts<In, T>::allocate(arena, call, rows, heads, block_k);
  s.bytes = DecodeBytes<In>::allocate(arena, call, rows, heads, block_k);
  if constexpr (DecodeNibbles::kExists<In>)
    s.nibbles = DecodeNibbles::allocate(arena, call, rows, heads, block_k);
  else
    s.nibbles = {};
  s.float8 = {};
  if constexpr (DecodeFloat8::kExists<T>) s.float8 = DecodeFloat8::allocate(arena, call, heads);
  s.integer_lanes = {};
  if constexpr (kUsesIntegerLanes<In>)
    if (has_integer_keys(call)) s.integer_lanes = LaneIntegers::allocate(arena, call, heads, block_k);
  s.scores = arena.take<T>(heads * score_rows<T>(rows) * block_k);
  s.sums = arena.take<T>(heads * score_rows<T>(rows) * decode_columns<T>(z.head_dim_v));
  // Only a bounded band can hide keys, or a function of the user.
  const bool may_mask = call.mask || call.functions || call.band.left < Band::kUnbounded ||
                        call.band.right < Band::kUnbounded || call.band.chunks;
  s.mask = allocate_mask_tile<T>(arena, call.mask, seqlen_q, block_k);
  s.mask.functions = allocate_functions<T>(arena, call, seqlen_q, block_k, false);
  s.dropout_tile = call.dropout ? arena.take<T>(seqlen_q * block_k) : nullptr;
  s.key_copy = copies_rows(call) ? arena.take<In>(kConvertedRows * z.head_dim) : nullptr;
  const bool may_copy = copies_rows(call) || may_mask || are_far_rows(call.v.stride_s * bytes_of(call.dtype));
  s.value_copy = may_copy ? arena.take<In>(block_k * z.head_dim_v) : nullptr;
  const bool is_8_bit = call.varlen.cache.dtype != CacheDType::kOfQuery;
  s.key_factors = is_8_bit ? arena.take<T>(heads * block_k) : nullptr;
  s.value_factors = is_8_bit ? arena.take<T>(heads * block_k) : nullptr;
  s.multiplied = arena.take<bool>(heads);
  s.added = arena.take<bool>(heads);
  s.prefetches = prefetches_rows(call, threads);
  return s;
}

// Results of one split, or of the consecutive splits of a key head.
template <class T>
struct SplitResult {
  T* out;      // [rows][D_v]  O, not yet divided by l
  T* row_max;  // [rows]       m
  T* row_sum;  // [rows]       l

  SplitResult skip(int64_t n, int64_t d_v) const { return {out + n * d_v, row_max + n, row_sum + n}; }
};
