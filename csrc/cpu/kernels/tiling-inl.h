// All tile sizes and their reasons. They were measured on Zen 5 (L1 48 KB, L2 1 MB): 96 queries instead of 48, or 128
// keys instead of 64, change a full forward by less than 5%. A causal forward takes up to 12% longer, because a larger
// part of the diagonal tiles is masked.
//
//             queries x keys   in L1                                   in L2
//  forward    48 x 64          S^T 12 KB; K or V 16 KB at D 64 (fp32)  K, V at D >= 128; Q^T, O
//             48 x 128         S^T 24 KB; AVX-512 without a mask       V; K of 16 bits at D >= 128
//  backward   64 x 64          P and dS, 16 KB each                    K, V, their transposes, dK, dV, Q, dO
//  decode     rows x 512       S of a few rows; K and V are streamed
#pragma once

#include "../vec/vec-inl.h"

struct Tiling {
  int64_t block_q,
      block_k;  // block_q: a multiple of 16 (core/philox.h) and of the lanes; block_k: of the lanes
};

// block_q is 3 or 6 vectors of 16 or 8 lanes, for the 3-vector register tile.
template <class T>
constexpr Tiling forward_tiling() {
  return {48, 64};
}

// Keys of a tile of a forward without a mask. With AVX-512, tiles of 128 keys save 1% (float32) to 2% (bfloat16) of a
// call, because O is read and written half as often. Scratch memory has room for this tile.
template <class T>
constexpr int64_t kMostForwardKeys =
#if FA_VECTOR_BYTES == 64 && !defined(FA_HAS_TILE_REGISTERS)
    2 *
#endif
    forward_tiling<T>().block_k;

template <class T>
constexpr Tiling backward_tiling() {
  return {64, 64};
}

// Register tiles of gemm-inl.h, {rows x vectors}: as many sums as possible, with registers left for the vectors of B
// and one broadcast of A. Three vectors if the columns are a multiple of three: 3 loads and 8 broadcasts feed 24
// multiply-adds.
#if defined(FA_MULTIPLIES_BY_LANE)
constexpr int kRowsBy3 = 6;   // 18 + 3 + 6 of 32 registers: the compiler loads all of A before it multiplies
constexpr int kRowsBy2 = 8;   // 16 + 2 + 8
constexpr int kRowsBy1 = 12;  // 12 + 1 + 12
#elif FA_VECTOR_REGISTERS >= 32
constexpr int kRowsBy3 = 8;   // 24 + 3 + 1 of 32 registers
constexpr int kRowsBy2 = 12;  // 24 + 2 + 1
constexpr int kRowsBy1 = 16;  // enough chains to hide the latency of an FMA
#else
constexpr int kRowsBy3 = 4;  // 12 + 3 + 1 of 16 registers
constexpr int kRowsBy2 = 6;  // 12 + 2 + 1
constexpr int kRowsBy1 = 8;
#endif

// Returns the tile size for scratch memory. A short sequence uses only a part of a tile.
inline int64_t fitted(int64_t block, int64_t length) { return std::min(block, (length + 15) / 16 * 16); }
inline Tiling fitted(const Tiling& t, const Sizes& z) {
  return {fitted(t.block_q, z.seqlen_q), fitted(t.block_k, z.seqlen_k)};
}
template <class T>
inline Tiling fitted_forward_tiling(const Sizes& z) {
  return fitted({forward_tiling<T>().block_q, kMostForwardKeys<T>}, z);
}

// Keys of a tile: DecodeTiles. The start and the end of a tile take as long as the products of several keys, and read no
// row. With 512 keys the calls take 0.62 to 0.95 of the time with 64 or 128 keys (Zen 5, 1 to 96 rows). The scores
// of a tile have at most 64 KiB of float32. A cache has at least 8 tiles, so that threads share it.
constexpr int64_t kDecodeKeys = 64, kMostDecodeKeys = 512, kMostDecodeScores = 16 << 10,
                  kLeastDecodeTiles = 8;
// Up to 16 rows have 256 keys in short caches, too: a split has at least 256 keys, so more tiles would serve no thread.
constexpr int64_t kRowsOfMoreKeys = 16, kMoreDecodeKeys = 256;
// Decode has up to 8 queries. With more queries the forward's tile was measured to be faster, with two exceptions: up to 32
// queries of at least 512 keys, and a long chunk, whose queries see at least 2 MiB of K and V of a head. AVX-512: up to 128 queries and
// 256 rows of a group. AVX2: up to 56 rows, as several vectors of rows. 40 and 56 rows take 0.92 to 0.97 of the time, in pages 0.84 to
// 0.90; 48 rows, a tile of the forward, 0.98 to 1.02, in pages 0.90 to 0.99; but 64 rows 0.97 to 1.06 (Zen 3).
constexpr int64_t kDecodeMaxQueries = 8;
constexpr int64_t kDecodeMaxChunk = 32, kDecodeMinKeysOfChunk = 512;
constexpr int64_t kDecodeMaxLongChunk = FA_VECTOR_BYTES == 64   ? 128
                                        : FA_VECTOR_BYTES == 32 ? 56
                                                                : kDecodeMaxChunk,
                  kDecodeMaxRowsOfLongChunk = FA_VECTOR_BYTES == 64 ? 256 : kDecodeMaxLongChunk,
                  kDecodeMinBytesOfLongChunk = 2 << 20;
constexpr int64_t kDecodeTasks =
    256;  // splits the keys until a batch of one has two tasks for each of 128 threads,
constexpr int64_t kDecodeMinKeys =
    256;  // but a split has at least so many keys, because merging it has a cost,
constexpr int64_t kDecodeKeysPerRow = 8;  // more keys for many rows: their results take longer to merge,
constexpr int64_t kDecodeMostKeys =
    4096;  // and at most this number, so that other threads do not wait for one long cache
// For __builtin_prefetch. Decode prefetches into L1: with L2, calls of decode take 1.0 to 1.3 times as long on Zen 5, even if
// lines leave L1 before they are read. Rows that a tile gathers, and masks, are faster in L2 (0.96 to 1.0 of the time).
constexpr int kPrefetchIntoL2 = 2, kPrefetchIntoL1 = 3;
