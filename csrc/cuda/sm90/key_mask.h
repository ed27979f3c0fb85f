// A mask that all heads and queries share, for example padding. It is stored as bits of the keys, in the order of the
// threads' columns.
#pragma once

#include <cstddef>

#include "../../core/mask.h"
#include "../../core/splits.h"

namespace flash_attn_ext::cuda::sm90 {

constexpr int kWordsOfTile = 4, kMaxTileKeys = 32 / 2 * 8;

// Word t of a tile is for thread t of four: bit 2 n + e is key 8 n + 2 t + e, its columns in an accumulator.
struct KeyMask {
  uint32_t* words = nullptr;  // [B][tiles][4], 1: attends; null: there is no mask
  int32_t* seen = nullptr;    // [B][2]: the tiles [begin, end); no key of another tile attends
  int tiles = 0;              // of the longest sequence

  KeyMask() = default;
  KeyMask(void* memory, const AttentionParams& p, int keys)
      : tiles(p.mask ? static_cast<int>(ceil_div(p.sizes.seqlen_k, keys)) : 0) {
    if (!p.mask) return;
    words = static_cast<uint32_t*>(memory);
    seen = reinterpret_cast<int32_t*>(words + p.sizes.batch * tiles * kWordsOfTile);
  }
  static size_t bytes(const AttentionParams& p, int keys) {
    const KeyMask mask(nullptr, p, keys);
    return p.mask ? sizeof(uint32_t) * p.sizes.batch * (mask.tiles * kWordsOfTile + 2) : 0;
  }

  FA_HOST_DEVICE explicit operator bool() const { return tiles > 0; }
  // The bits of a thread's columns of a tile.
  FA_HOST_DEVICE uint32_t columns(int b, uint32_t tile, uint32_t thread) const {
    return *this ? words[(static_cast<uint32_t>(b) * tiles + tile) * kWordsOfTile + thread % kWordsOfTile]
                 : ~0u;
  }
  FA_HOST_DEVICE bool attends(int b, int tile, int key) const {
    return !*this ||
           words[(int64_t{b} * tiles + tile) * kWordsOfTile + key % 8 / 2] >> (key / 8 * 2 + key % 2) & 1;
  }
  // The part of `keys` in the tiles from the first to the last with a key that attends. `all`: of the sequence.
  FA_HOST_DEVICE Range shown_keys(Range keys, int b, int64_t all, int tile_keys) const {
    const Range tiles = seen_tiles(b, ceil_div(all, tile_keys));
    const int64_t begin = tiles.begin * tile_keys, end = tiles.end * tile_keys;
    return {begin < keys.begin ? keys.begin : begin, end < keys.end ? end : keys.end};
  }
  // The tiles of [0, all), from the first to the last with a key that attends.
  FA_HOST_DEVICE Range seen_tiles(int b, int all) const {
    return *this ? Range{seen[2 * b], seen[2 * b + 1]} : Range{0, all};
  }
};

}  // namespace flash_attn_ext::cuda::sm90
