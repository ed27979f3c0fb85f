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
    uint64_t bits = visible.bits(q);
    for (int64_t j = f.j0, end; j < f.j0 + f.keys; j = end) {
      end = std::min((j / blocks.block_k + 1) * blocks.block_k, f.j0 + f.keys);
      const int64_t count = end - j;
      const uint64_t block = (count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1) << (j - f.j0);
      const uint8_t state = blocks.at(f.b, f.h, first_query_of_blocks(p) + f.i0 + q, j);
      if (state == BlockStates::kHidden) bits &= ~block;
      if (state == BlockStates::kFull) bits |= block;
    }
    visible.set_bits(q, bits);
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
    uint64_t bits = visible.bits(q) & every_key;
    if (tile.visible) bits &= tile.visible.bits(q);
    visible.set_bits(q, bits);
    seen_by_all &= bits;
    seen_by_any |= bits;
  }
  if (seen_by_all == every_key) return tile;
  tile.visible = visible;
  tile.masked = seen_by_any == 0 ? TileMask::kAll : TileMask::kSome;
  if (seen_by_any == 0) return tile;
  tile.seen_keys = {__builtin_ctzll(seen_by_any), VisibleKeys::kKeys - __builtin_clzll(seen_by_any)};
  return tile;
}

// A part of a tile that contains all visible elements of some queries, in steps of 16 queries and keys.
struct SeenPart {
  Range queries, keys;  // of the tile

  static SeenPart of(const VisibleKeys& visible, const TileFrame& f, const Range& queries) {
    Range rows{queries.end, queries.begin};
    uint64_t seen = 0;
    for (int64_t q = queries.begin; q < queries.end; ++q) {
      const uint64_t bits = visible.bits(q);
      if (bits == 0) continue;
      rows = {std::min(rows.begin, q), q + 1};
      seen |= bits;
    }
    if (seen == 0) return {};
    return {in_steps(rows, f.queries), in_steps({__builtin_ctzll(seen), 64 - __builtin_clzll(seen)}, f.keys)};
  }
  // A step is a multiple of vectors, and of a call of Philox (core/philox.h).
  static Range in_steps(const Range& seen, int64_t count) {
    constexpr int64_t kStep = 16;
    return {seen.begin / kStep * kStep, std::min(ceil_div(seen.end, kStep) * kStep, count)};
  }
  // The smallest part that contains both.
  SeenPart joined(const SeenPart& other) const {
    if (elements() == 0) return other;
    if (other.elements() == 0) return *this;
    const auto join = [](const Range& a, const Range& b) {
      return Range{std::min(a.begin, b.begin), std::max(a.end, b.end)};
    };
    return {join(queries, other.queries), join(keys, other.keys)};
  }
  int64_t elements() const { return (queries.end - queries.begin) * (keys.end - keys.begin); }
  // The frame of the part of a tile of the backward.
  template <class T>
  TileFrame frame(TileFrame f) const {
    f.i0 += queries.begin;
    f.queries = queries.end - queries.begin;
    f.j0 += keys.begin;
    f.keys = keys.end - keys.begin;
    f.ld = round_up_to_lanes<T>(f.keys);
    return f;
  }
};

// Cuts a tile of the forward to the keys that `mask` shows. Then `mask` is the mask of the cut tile.
template <class T>
TileFrame cut_keys(TileFrame f, MaskTile<T>& mask) {
  if (mask.seen_keys.end == 0) return f;
  const Range keys = SeenPart::in_steps(mask.seen_keys, f.keys);
  f.j0 += keys.begin;
  f.keys = keys.end - keys.begin;
  mask.visible.first_key += keys.begin;
  if (mask.bias) mask.bias += keys.begin * f.ld;
  return f;
}

// Calls use(frame, mask) for the parts of a tile of the backward that `mask` shows: two halves of the queries, if they
// have few elements together, as on the diagonal of a causal mask. Otherwise one part.
template <class T, class Use>
void for_each_seen_part(const TileFrame& f, const MaskTile<T>& mask, const Use& use) {
  // The rows of a bias have the distance f.ld.
  if (mask.seen_keys.end == 0 || mask.bias) return use(f, mask);
  const auto use_part = [&](const SeenPart& part) {
    if (part.elements() == 0) return;
    MaskTile<T> own_mask = mask;
    own_mask.visible.first_query += part.queries.begin;
    own_mask.visible.first_key += part.keys.begin;
    use(part.template frame<T>(f), own_mask);
  };
  const int64_t half = std::min<int64_t>(f.queries, 32);
  const SeenPart first = SeenPart::of(mask.visible, f, {0, half}),
                 last = SeenPart::of(mask.visible, f, {half, f.queries}), whole = first.joined(last);
  if (4 * (first.elements() + last.elements()) > 3 * whole.elements()) return use_part(whole);
  use_part(first);
  use_part(last);
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

  if (mask.visible.words != memory.visible.words) {
    const VisibleKeys others = mask.visible;  // of a bool mask
    mask.visible = memory.visible;
    for (int64_t q = 0; q < f.queries; ++q)
      mask.visible.set_bits(q, others ? others.bits(q) : every_key_of(f));
  }
  for (int64_t r = 0; r < f.rows(); ++r)
    for (int64_t c = 0; c < f.lanes(); ++c)
      if (scores[r * f.ld + c] == kNegInf<T>) {
        const int64_t query = f.lanes_are_queries ? c : r, key = f.lanes_are_queries ? r : c;
        mask.visible.set_bits(query, mask.visible.bits(query) & ~(uint64_t{1} << key));
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
