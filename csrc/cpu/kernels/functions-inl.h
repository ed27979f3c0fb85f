// Functions of the user (core/program.h) on one tile: masks become bits, scores become new scores, gradients of new
// scores become gradients of old scores.
#pragma once

#include "kept_masks-inl.h"

template <class T>
FunctionMemory<T> allocate_functions(Arena& arena, const AttentionParams& p, int64_t block_q, int64_t block_k,
                                     bool is_backward) {
  FunctionMemory<T> memory;
  if (!p.functions) return memory;
  const int64_t lanes = round_up_to_lanes<T>(std::max(block_q, block_k));
  memory.program = ProgramMemory<T>::allocate(arena, *p.functions, lanes);
  memory.visible.ld = round_up_to_lanes<T>(block_q);
  memory.visible.words = arena.take<uint32_t>(2 * memory.visible.ld);
  if (is_backward && p.functions->score) memory.old_scores = arena.take<T>(block_q * lanes);
  return memory;
}

inline uint64_t every_key_of(const TileFrame& f) {
  return f.keys == 64 ? ~uint64_t{0} : (uint64_t{1} << f.keys) - 1;
}

inline uint64_t bits_of_query(const VisibleKeys& keys, int64_t query) {
  return keys.words[query] | uint64_t{keys.words[keys.ld + query]} << VisibleKeys::kWord;
}
inline void set_bits_of_query(const VisibleKeys& keys, int64_t query, uint64_t bits) {
  keys.words[query] = static_cast<uint32_t>(bits);
  keys.words[keys.ld + query] = static_cast<uint32_t>(bits >> VisibleKeys::kWord);
}

// Stores which keys the mask function shows to each query of the tile, as bits.
template <class T>
void load_mask_function(const AttentionParams& p, const TileFrame& f, const FunctionMemory<T>& memory) {
  using U = VecBits<T>;
  constexpr int L = kLanes<T>;
  const VisibleKeys& visible = memory.visible;
  std::fill(visible.words, visible.words + 2 * visible.ld, 0u);
  const ProgramRun<T> run{p.functions->mask, *p.functions,  f, first_query_index(p), nullptr,
                          nullptr,           memory.program};
  run.run([&](int64_t r0, int64_t rows, const ProgramSource<T>& result) {
    for (int64_t c = 0; c < f.ld; c += L) {
      if (f.lanes_are_queries) {
        // A strip of keys is half a word of each query.
        static_assert(VisibleKeys::kWord % kStripRows == 0);
        U half = {};
        for (int64_t r = 0; r < rows; ++r) half |= (U)result.at(r, c) & ((U{} + 1) << r);
        typedef uint32_t Words __attribute__((vector_size(4 * L)));
        uint32_t* at = visible.words + r0 / VisibleKeys::kWord * visible.ld + c;
        Words words;
        std::memcpy(&words, at, sizeof words);
        words |= __builtin_convertvector(half, Words) << (r0 % VisibleKeys::kWord);
        std::memcpy(at, &words, sizeof words);
        continue;
      }
      for (int64_t r = 0; r < rows; ++r) {
        U bits = (U)result.at(r, c) & ((U{} + 1) << (U)iota<T>());
#pragma GCC unroll 8
        for (int d = L / 2; d > 0; d /= 2) bits |= (U)rotate<T>((Vec<T>)bits, d);
        visible.words[c / VisibleKeys::kWord * visible.ld + r0 + r] |= static_cast<uint32_t>(bits[0])
                                                                       << (c % VisibleKeys::kWord);
      }
    }
  });
}

// The index that block masks have for query 0 of one sequence's call: BlockStates::queries_before.
inline int64_t first_query_of_blocks(const AttentionParams& p) {
  return first_query_index(p) + p.functions->blocks.queries_before;
}

// Returns the first key from j on that a block of these queries shows, or a key far beyond the last key.
inline int64_t first_key_of_blocks(const AttentionParams& p, int64_t b, int64_t h, int64_t i0,
                                   int64_t queries, int64_t j) {
  constexpr int64_t kNone = int64_t{1} << 62;
  const BlockStates& blocks = p.functions->blocks;
  const int64_t first = first_query_of_blocks(p) + i0;
  const Range rows{blocks.row_of(first), blocks.row_of(first + queries - 1) + 1};
  const uint8_t* states = blocks.of_head(b, h);
  for (int64_t col = blocks.col_of(j); col < blocks.cols; ++col)
    for (int64_t row = rows.begin; row < rows.end; ++row)
      if (states[row * blocks.cols + col] != BlockStates::kHidden) return std::max(j, col * blocks.block_k);
  return kNone;
}

inline StatesOfTile states_of_tile(const AttentionParams& p, const TileFrame& f) {
  const int64_t i = first_query_of_blocks(p) + f.i0;
  return {p.functions->blocks, bool(p.functions->mask), f.b, f.h, i, i + f.queries, f.j0, f.j0 + f.keys};
}

// The block mask has priority over the mask function: bits of hidden blocks are cleared, bits of full blocks are set.
inline void apply_blocks(const AttentionParams& p, const TileFrame& f, const VisibleKeys& visible) {
  const BlockStates& blocks = p.functions->blocks;
  for (int64_t q = 0; q < f.queries; ++q) {
    uint64_t bits = bits_of_query(visible, q);
    for (int64_t j = f.j0, end; j < f.j0 + f.keys; j = end) {
      end = std::min((j / blocks.block_k + 1) * blocks.block_k, f.j0 + f.keys);
      const int64_t count = end - j;
      const uint64_t block = (count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1) << (j - f.j0);
      const uint8_t state = blocks.at(f.b, f.h, first_query_of_blocks(p) + f.i0 + q, j);
      if (state == BlockStates::kHidden) bits &= ~block;
      if (state == BlockStates::kFull) bits |= block;
    }
    set_bits_of_query(visible, q, bits);
  }
}

// Returns `tile`, the tile's other masks, together with the block mask and the mask function.
template <class T>
MaskTile<T> with_functions(const AttentionParams& p, const TileFrame& f, MaskTile<T> tile,
                           const FunctionMemory<T>& memory) {
  if (!p.functions) return tile;
  tile.functions = memory;
  if (!p.functions->hides() || tile.masked == TileMask::kAll) return tile;
  const StatesOfTile states = states_of_tile(p, f);
  if (states.is_full()) return tile;
  const VisibleKeys& visible = memory.visible;
  if (states.is_hidden()) {
    std::fill(visible.words, visible.words + 2 * visible.ld, 0u);
    tile.visible = visible;
    tile.masked = TileMask::kAll;
    return tile;
  }
  const auto run_function = [&] { load_mask_function<T>(p, f, memory); };
  if (states.is_partial() && memory.kept)
    memory.kept->load(f, first_query_index(p), visible, run_function);
  else if (states.is_partial())
    run_function();
  else
    std::fill(visible.words, visible.words + 2 * visible.ld, ~0u);
  if (states.lowest != states.highest) apply_blocks(p, f, visible);

  const uint64_t every_key = every_key_of(f);
  uint64_t seen_by_all = every_key, seen_by_any = 0;
  for (int64_t q = 0; q < f.queries; ++q) {
    uint64_t bits = bits_of_query(visible, q) & every_key;
    if (tile.visible) bits &= bits_of_query(tile.visible, q);
    set_bits_of_query(visible, q, bits);
    seen_by_all &= bits;
    seen_by_any |= bits;
  }
  if (seen_by_all == every_key) return tile;
  tile.visible = visible;
  tile.masked = seen_by_any == 0 ? TileMask::kAll : TileMask::kSome;
  tile.seen_keys = seen_by_any == 0 ? 0 : VisibleKeys::kKeys - __builtin_clzll(seen_by_any);
  return tile;
}

// Replaces the scores of a tile by the results of the user's function. A score of -inf counts as masked: `mask` hides
// it then. Returns whether the function masked an element.
template <class T>
bool apply_score_function(const AttentionParams& p, const TileFrame& f, MaskTile<T>& mask, T* scores) {
  constexpr int L = kLanes<T>;
  const FunctionMemory<T>& memory = mask.functions;
  if (memory.old_scores) std::copy(scores, scores + f.rows() * f.ld, memory.old_scores);
  VecIndex<T> hidden = {};
  const ProgramRun<T> run{p.functions->score, *p.functions, f, first_query_index(p), scores, nullptr,
                          memory.program};
  run.run([&](int64_t r0, int64_t rows, const ProgramSource<T>& result) {
    for (int64_t r = 0; r < rows; ++r) {
      T* row = scores + (r0 + r) * f.ld;
      for (int64_t c = 0; c < f.ld; c += L) {
        const Vec<T> score = result.at(r, c);
        store<T>(row + c, score);
        hidden |= score == kNegInf<T>;
      }
    }
  });
  const Vec<T> any = (Vec<T>)hidden;
  uint8_t bytes[sizeof any];
  std::memcpy(bytes, &any, sizeof any);
  if (std::all_of(bytes, bytes + sizeof any, [](uint8_t byte) { return byte == 0; })) return false;

  const VisibleKeys& visible = memory.visible;
  if (!mask.visible) {
    for (int64_t q = 0; q < f.queries; ++q) set_bits_of_query(visible, q, every_key_of(f));
  } else if (mask.visible.words != visible.words) {
    for (int64_t q = 0; q < f.queries; ++q) set_bits_of_query(visible, q, bits_of_query(mask.visible, q));
  }
  mask.visible = visible;
  for (int64_t r = 0; r < f.rows(); ++r)
    for (int64_t c = 0; c < f.lanes(); ++c)
      if (scores[r * f.ld + c] == kNegInf<T>) {
        const int64_t query = f.lanes_are_queries ? c : r, key = f.lanes_are_queries ? r : c;
        set_bits_of_query(visible, query, bits_of_query(visible, query) & ~(uint64_t{1} << key));
      }
  return true;
}

// Converts the gradient of the new scores to the gradient of the old scores, in place. Masked elements keep their 0.
template <class T>
void apply_gradient_function(const AttentionParams& p, const TileFrame& f, const FunctionMemory<T>& memory,
                             T* dscores) {
  constexpr int L = kLanes<T>;
  const ProgramRun<T> run{p.functions->gradient, *p.functions,      f,
                          first_query_index(p),  memory.old_scores, dscores,
                          memory.program};
  run.run([&](int64_t r0, int64_t rows, const ProgramSource<T>& result) {
    for (int64_t r = 0; r < rows; ++r) {
      T* row = dscores + (r0 + r) * f.ld;
      for (int64_t c = 0; c < f.ld; c += L) {
        const Vec<T> ds = load<T>(row + c);
        store<T>(row + c, ds == T(0) ? ds : result.at(r, c));
      }
    }
  });
}

// Adds one tile to the gradients of the captured elements. `dscores` is the gradient of the new scores.
template <class T>
void add_captured_gradients(const AttentionParams& p, const TileFrame& f, const FunctionMemory<T>& memory,
                            T* dscores, double* sums) {
  const ProgramRun<T> run{p.functions->captured_gradient,
                          *p.functions,
                          f,
                          first_query_index(p),
                          memory.old_scores,
                          dscores,
                          memory.program,
                          sums};
  run.run([](int64_t, int64_t, const ProgramSource<T>&) {});
}
