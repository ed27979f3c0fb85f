// Stores the keys that a mask function shows in a tile, for the other heads. Most mask functions depend only on
// positions, so without this table a thread would compute the same tile for each of its heads.
#pragma once

#include "mask_tile-inl.h"

// A table with a slot for each tile of some rows and columns of tiles. A new tile replaces the old tile in its slot.
struct KeptMasks {
  static constexpr int64_t kKeys = 64, kColumns = 5, kMostSlots = 128 * kColumns;

  struct Tile {
    int64_t b, i, j, queries, keys;  // i: -1 if the slot is empty
  };
  int64_t slots = 0, words_per_tile = 0;
  int64_t rows = 1;  // queries of a row of slots
  bool depends_on_batch = false;
  Tile* tiles = nullptr;      // [slots]
  uint32_t* words = nullptr;  // [slots][words_per_tile]

  explicit operator bool() const { return slots > 0; }

  // Allocates an empty table for each thread. A tile has at most `queries` queries, and most tiles have at least `rows`.
  template <class T>
  static KeptMasks* allocate_for_threads(Arena& arena, const AttentionParams& call, int threads,
                                         int64_t queries, int64_t rows) {
    KeptMasks* tables = arena.take<KeptMasks>(threads);
    for (int thread = 0; thread < threads; ++thread) {
      const KeptMasks kept = allocate(arena, call, 2 * round_up_to_lanes<T>(queries), rows);
      if (!tables) continue;
      tables[thread] = kept;
      kept.clear();
    }
    return tables;
  }

  // `words`: the words of a tile's VisibleKeys. The table has no slots if the tiles of two heads may differ.
  static KeptMasks allocate(Arena& arena, const AttentionParams& call, int64_t words, int64_t rows) {
    KeptMasks kept;
    if (!call.functions || !call.functions->mask) return kept;
    const Program& mask = call.functions->mask;
    for (int64_t n = 0; n < mask.count(); ++n) {
      if (mask.at(n).operation() == Operation::head) return kept;
      kept.depends_on_batch |= mask.at(n).operation() == Operation::batch;
    }
    const Sizes& z = call.sizes;
    if (z.heads * (kept.depends_on_batch ? 1 : z.batch) < 2) return kept;
    kept.rows = rows;
    kept.slots = std::min(ceil_div(z.seqlen_q, rows) * kColumns, kMostSlots);
    kept.words_per_tile = words;
    kept.tiles = arena.take<Tile>(kept.slots);
    kept.words = arena.take<uint32_t>(kept.slots * words);
    return kept;
  }

  void clear() const {
    for (int64_t n = 0; n < slots; ++n) tiles[n].i = -1;
  }

  // If the table does not have the tile, calls compute(), which stores the keys in `visible`.
  template <class Compute>
  void load(const TileFrame& f, int64_t first_query, const VisibleKeys& visible,
            const Compute& compute) const {
    if (!slots) return compute();
    const Tile wanted{depends_on_batch ? f.b : 0, first_query + f.i0, f.j0, f.queries, f.keys};
    if (wanted.i < 0) return compute();  // a cache with fewer keys than queries
    const int64_t slot = (wanted.i / rows * kColumns + f.j0 / kKeys % kColumns) % slots;
    Tile& tile = tiles[slot];
    uint32_t* const kept = words + slot * words_per_tile;
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
