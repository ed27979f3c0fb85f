// How the backward is cut into blocks, what they leave in the workspace, and in which order they add to dQ.
#pragma once

#include "../../core/mask.h"
#include "../../core/params.h"
#include "../../core/splits.h"
#include "../divider.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kPieceRows = 64;  // query rows of an accumulator of dQ

// Keys of a block and query rows of a tile. Registers set them: S, dP, dK and dV are in them at a time.
constexpr int backward_keys(int64_t head_dim) { return head_dim == 256 ? 64 : 128; }
constexpr int backward_rows(int64_t head_dim) { return head_dim == 64 ? 128 : 64; }

struct BackwardWorkspace {
  int64_t tiles, rows;  // of queries, per head: whole tiles
  // dQ before its scale, [B * H][rows / 64][D / 64][8][128][4]: of each 64 x 64 the fours n of accumulator
  // registers, by threads. So what a block adds is contiguous, and its threads exchange no elements.
  float* dq;
  float* lse2;      // [B * H][rows] lse in units of log2; +inf, which makes P = 0, where nothing is visible
  float* delta;     // [B * H][rows] rowsum(dO o O) - dlse
  int32_t* turns;   // [B * H][tiles] how many blocks have added to a tile of dQ
  int32_t* ticket;  // how many blocks have begun

  BackwardWorkspace(void* workspace, const Sizes& z)
      : tiles(ceil_div(z.seqlen_q, backward_rows(z.head_dim))), rows(tiles * backward_rows(z.head_dim)) {
    const int64_t heads = z.batch * z.heads;
    dq = static_cast<float*>(workspace);
    lse2 = dq + heads * rows * z.head_dim;
    delta = lse2 + heads * rows;
    turns = reinterpret_cast<int32_t*>(delta + heads * rows);
    ticket = turns + heads * tiles;
  }
  static int64_t bytes(const Sizes& z) {
    const BackwardWorkspace w(nullptr, z);
    return 4 * (z.batch * z.heads * (w.rows * (z.head_dim + 2) + w.tiles) + 1);
  }
};

// Where lse2 and delta have a row.
struct PaddedRows {
  int64_t rows;  // of a head

  FA_HOST_DEVICE int64_t operator()(const AttentionParams& p, int64_t b, int64_t h, int64_t i) const {
    return (b * p.sizes.heads + h) * rows + i;
  }
};

struct KeyTile {
  int b, h_kv, tile;
};

// In which order the tiles of keys are taken: head after head. Causal lets the first keys see most queries, so
// they come first; deterministic takes the last ones first, who add to a tile of dQ first.
struct KeyTileOrder {
  int tiles;  // of a head
  bool last_first;
  Divider by_tiles, by_heads;

  KeyTileOrder(const BackwardParams& p)
      : tiles(static_cast<int>(ceil_div(p.sizes.seqlen_k, backward_keys(p.sizes.head_dim)))),
        last_first(p.deterministic),
        by_tiles(tiles),
        by_heads(p.sizes.heads_kv) {}
  FA_HOST_DEVICE KeyTile operator()(int block) const {
    const int head = by_tiles.quotient(block), tile = by_tiles.remainder(block);
    return {by_heads.quotient(head), by_heads.remainder(head), last_first ? tiles - 1 - tile : tile};
  }
};

// The turn in which a tile of keys adds to a tile of dQ: tiles of later keys go first. In a causal call a tile of
// keys begins with the queries at its diagonal. No later keys are visible to them, so it does not wait there.
FA_HOST_DEVICE inline int64_t turn_of(const AttentionParams& p, int64_t key_tile, int64_t row_tile) {
  const int64_t rows = backward_rows(p.sizes.head_dim), begin = row_tile * rows, end = begin + rows;
  const Range seen =
      visible_keys(p.band, begin, end < p.sizes.seqlen_q ? end : p.sizes.seqlen_q, p.sizes.seqlen_k);
  return (seen.end - 1) / backward_keys(p.sizes.head_dim) - key_tile;
}

}  // namespace flash_attn_ext::cuda::sm90
