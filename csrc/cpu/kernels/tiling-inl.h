// Tile sizes, in one table, with their reasons. Cache tiles were swept on Zen 5 (L1 48 KB, L2 1 MB): 96 for
// 48 or 128 for 64 changes a full forward by less than 5%, and costs a causal one up to 12%, whose diagonal
// tiles are wasted work.
//
//              queries x keys   in L1                                     in L2
//   forward         48 x 64     S^T 12 KB; K or V 16 KB at D 64 (fp32)    K, V at D >= 128; Q^T, O
//   backward        64 x 64     P and dS, 16 KB each                      K, V and their transposes, dK, dV,
//   Q, dO decode        S_q <= 8 x 64   S of a few rows; K and V stream through
#pragma once

#include "../vec/vec-inl.h"

struct Tiling {
  int64_t block_q,
      block_k;  // block_q: a multiple of 16 (core/philox.h) and of the lanes; block_k of the lanes
};

// block_q is 3 or 6 vectors of 16 or 8 lanes, for the 3-vector register tile.
template <class T>
constexpr Tiling forward_tiling() {
  return {48, 64};
}

template <class T>
constexpr Tiling backward_tiling() {
  return {64, 64};
}

// Register tiles of gemm-inl.h, {rows x vectors}: as many accumulators as leave registers for the vectors of
// B and one broadcast of A. Three vectors where the columns divide by three: 3 loads and 8 broadcasts feed 24
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

// The sizes that scratch memory needs: a short sequence fills only part of its tiles.
inline int64_t fitted(int64_t block, int64_t length) { return std::min(block, (length + 15) / 16 * 16); }
inline Tiling fitted(const Tiling& t, const Sizes& z) {
  return {fitted(t.block_q, z.seqlen_q), fitted(t.block_k, z.seqlen_k)};
}

template <class T>
constexpr int64_t decode_block_k() {
  return 64;
}
constexpr int64_t kDecodeMaxQueries = 8;  // beyond, measured, the forward's tile is the faster one
constexpr int64_t kDecodeTasks = 256;  // keys are split until a batch of one has two for each of 128 threads,
constexpr int64_t kDecodeMinBlocks = 4;  // but into no fewer key blocks each: a split costs a merge
constexpr int64_t kDecodeMostBlocks =
    64;                            // nor into more: one long cache must not keep other threads waiting
constexpr int kPrefetchLevel = 2;  // of __builtin_prefetch: into L2, what the next tile or step reads
