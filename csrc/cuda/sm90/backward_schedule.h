// Cuts the backward into blocks: its workspace, and the order in which blocks add to dQ.
#pragma once

#include "../../core/mask.h"
#include "../../core/params.h"
#include "../../core/splits.h"
#include "../divider.h"
#include "key_mask.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kPieceRows = 64;  // query rows of an accumulator of dQ

// Keys of a block and query rows of a tile, by the head dimension of query and key. The registers limit both: they hold
// S, dP, dK and dV at once.
constexpr int backward_keys(int head_dim, bool functions = false) {
  // With functions of the user, 128 keys at a head dimension of 128 would spill 12 registers.
  return head_dim > 128 || (functions && head_dim == 128) ? 64 : 128;
}
inline int backward_keys(const AttentionParams& p) {
  return backward_keys(backward_head_dims(p).qk, p.functions != nullptr);
}
constexpr int backward_rows(int head_dim, bool plain) { return head_dim == 64 && plain ? 128 : 64; }

// The tiles of queries in the workspace. A head has whole tiles. Packed sequences share the tiles of a head; each
// sequence starts a new tile, so it adds at most one tile.
struct QueryTiles {
  int tile_rows, longest, of_head;  // rows of a tile; tiles of the longest sequence; tiles of a head

  explicit QueryTiles(const AttentionParams& p)
      : tile_rows(backward_rows(backward_head_dims(p).qk, is_plain(p))),
        longest(static_cast<int>(ceil_div(p.sizes.seqlen_q, tile_rows))),
        of_head(p.varlen ? static_cast<int>(p.varlen.total_q / tile_rows + p.sizes.batch) : longest) {}

  int64_t count(const AttentionParams& p) const {
    return (p.varlen ? 1 : p.sizes.batch) * p.sizes.heads * of_head;
  }
  // The first tile of sequence b in head 0; p is the call of this sequence. 32 bits are enough: a tile of dQ takes at
  // least 16 KB of memory.
  FA_HOST_DEVICE int first(const AttentionParams& p, int64_t b) const {
    // Without a division, because a block's first load waits for this.
    const int64_t before = tile_rows == 128 ? p.varlen.first_q / 128 : p.varlen.first_q / 64;
    return static_cast<int>(p.varlen ? before + b : b * p.sizes.heads * of_head);
  }
  // The index of a row in lse2 and delta.
  FA_HOST_DEVICE int64_t operator()(const AttentionParams& p, int64_t b, int64_t h, int64_t i) const {
    return (first(p, b) + h * of_head) * tile_rows + i;
  }
};

struct BackwardWorkspace {
  QueryTiles tiles;
  // dQ before its scale, [tiles][rows / 64][D / 8][128][4]. A 64 x 8 piece is four accumulator registers of each of 128
  // threads. So a block adds contiguous memory, and its threads exchange no elements.
  float* dq;
  float* lse2;      // [tiles][rows] lse in units of log2; +inf, so that P = 0, if no key is visible
  float* delta;     // [tiles][rows] rowsum(dO o O) - dlse
  int32_t* turns;   // [B * H][tiles of the longest sequence] how many blocks have added to this tile of dQ
  int32_t* ticket;  // how many blocks have begun
  KeyMask key_mask;

  BackwardWorkspace(void* workspace, const BackwardParams& p) : tiles(p) {
    const Sizes& z = p.sizes;
    const int64_t rows = tiles.count(p) * tiles.tile_rows;
    dq = static_cast<float*>(workspace);
    lse2 = dq + rows * backward_head_dims(p).qk;
    delta = lse2 + rows;
    turns = reinterpret_cast<int32_t*>(delta + rows);
    ticket = turns + z.batch * z.heads * tiles.longest;
    key_mask = KeyMask(ticket + 1, p, backward_keys(p));
  }
  static size_t bytes(const BackwardParams& p) {
    const Sizes& z = p.sizes;
    const QueryTiles tiles(p);
    const int64_t rows = tiles.count(p) * tiles.tile_rows;
    const int head_dim = backward_head_dims(p).qk;
    return 4 * (rows * (head_dim + 2) + z.batch * z.heads * tiles.longest + 1) +
           KeyMask::bytes(p, backward_keys(p));
  }
};

struct KeyTile {
  int b, h_kv, tile;
};

// The order of the key tiles: head after head. In a causal call most queries see the first keys, so the first keys are
// first. In a deterministic call the last keys are first, because they add to dQ first.
struct KeyTileOrder {
  int tiles;  // of a head
  bool last_first;
  Divider by_tiles, by_heads;

  // `sharers`: blocks with neighbouring tiles that run together. `tiles` is a multiple of it, so the last tile may have no
  // keys.
  explicit KeyTileOrder(const BackwardParams& p, int sharers = 1)
      : tiles(static_cast<int>(ceil_div(p.sizes.seqlen_k, sharers * backward_keys(p)) * sharers)),
        last_first(p.deterministic),
        by_tiles(tiles),
        by_heads(p.sizes.heads_kv) {}
  FA_HOST_DEVICE KeyTile operator()(int block) const {
    const int head = by_tiles.quotient(block), tile = by_tiles.remainder(block);
    return {by_heads.quotient(head), by_heads.remainder(head), last_first ? tiles - 1 - tile : tile};
  }
};

}  // namespace flash_attn_ext::cuda::sm90
