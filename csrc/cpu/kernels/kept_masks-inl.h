// Keeps the keys that a mask function shows in a tile, for the other heads. Most mask functions depend on positions alone,
// and a thread computes the same tile for each of its heads.
#pragma once

#include "mask_tile-inl.h"

// A table with a place for each tile of some rows and columns of tiles. A tile replaces another one at its place.
struct KeptMasks {
  static constexpr int64_t kRows = 32, kKeys = 64, kColumns = 5, kMostPlaces = 128 * kColumns;

  struct Tile {
    int64_t b, i, j, queries, keys;  // i: -1 where the place is empty
  };
  int64_t places = 0, words_per_tile = 0;
  bool depends_on_batch = false;
  Tile* tiles = nullptr;      // [places]
  uint32_t* words = nullptr;  // [places][words_per_tile]

  explicit operator bool() const { return places > 0; }

  // `words`: of a tile, VisibleKeys. Has no places if the tiles of two heads may differ.
  static KeptMasks allocate(Arena& arena, const AttentionParams& call, int64_t words) {
    KeptMasks kept;
    if (!call.functions || !call.functions->mask) return kept;
    const Program& mask = call.functions->mask;
    for (int64_t n = 0; n < mask.count(); ++n) {
      if (mask.at(n).operation() == Operation::head) return kept;
      kept.depends_on_batch |= mask.at(n).operation() == Operation::batch;
    }
    const Sizes& z = call.sizes;
    if (z.heads * (kept.depends_on_batch ? 1 : z.batch) < 2) return kept;
    kept.places = std::min(ceil_div(z.seqlen_q, kRows) * kColumns, kMostPlaces);
    kept.words_per_tile = words;
    kept.tiles = arena.take<Tile>(kept.places);
    kept.words = arena.take<uint32_t>(kept.places * words);
    return kept;
  }

  void clear() const {
    for (int64_t n = 0; n < places; ++n) tiles[n].i = -1;
  }

  // Calls compute(), which stores the keys in `visible`, unless the table has them.
  template <class Compute>
  void load(const TileFrame& f, int64_t first_query, const VisibleKeys& visible,
            const Compute& compute) const {
    if (!places) return compute();
    const Tile wanted{depends_on_batch ? f.b : 0, first_query + f.i0, f.j0, f.queries, f.keys};
    if (wanted.i < 0) return compute();  // a cache with fewer keys than queries
    const int64_t place = (wanted.i / kRows * kColumns + f.j0 / kKeys % kColumns) % places;
    Tile& tile = tiles[place];
    uint32_t* const kept = words + place * words_per_tile;
    if (tile.i == wanted.i && tile.j == wanted.j && tile.b == wanted.b && tile.queries == wanted.queries &&
        tile.keys == wanted.keys) {
      std::copy(kept, kept + words_per_tile, visible.words);
      return;
    }
    compute();
    tile = wanted;
    std::copy(visible.words, visible.words + words_per_tile, kept);
  }
};
