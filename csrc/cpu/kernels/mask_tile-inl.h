// attn_mask and key_mask on one tile, for all dtypes and strides. A float mask becomes a bias, -inf where it hides a
// key. A bool mask becomes one bit per score.
#pragma once

#include "mask_in_place-inl.h"
#include "program-inl.h"

// A tile with a partial last vector counts as partly visible, because lanes beyond the end read 0.
template <class T, class M>
inline TileMask load_bias_as(const MaskParams& mask, const TileFrame& f, T* dst) {
  const M* src = mask_at<M>(mask, f);
  const int64_t row_stride = f.lanes_are_queries ? mask.stride_k : mask.stride_q;
  const int64_t lane_stride = f.lanes_are_queries ? mask.stride_q : mask.stride_k;
  const int64_t rows = f.rows(), lanes = f.lanes();
  MaskedAndNot<T> seen;
  if (lane_stride == 0) {
    for (int64_t r = 0; r < rows; ++r) {
      const T bias = seen.record(splat<T>(scalar_as<T>(src[r * row_stride])))[0];
      std::fill(dst + r * f.ld, dst + r * f.ld + f.ld, bias);
    }
  } else if (lane_stride == 1) {
    load_bias_rows<T, M>(src, row_stride, rows, lanes, dst, f.ld, seen);
  } else if (row_stride == 1) {
    const auto put = [&](int64_t r, int64_t c, Vec<T> bias)
                         FA_INLINE_LAMBDA { store<T>(dst + r * f.ld + c, bias); };
    seen = for_each_transposed<T, Prefetch::kYes>(src, lane_stride, lanes, rows, put);
  } else {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < lanes; ++c)
        dst[r * f.ld + c] = seen.record(splat<T>(scalar_as<T>(src[r * row_stride + c * lane_stride])))[0];
  }
  return seen.of_tile();
}

// Adds two biases. If one of them is -inf, the sum is -inf, even if the other is NaN or +inf.
template <class T>
FA_INLINE Vec<T> add_bias(Vec<T> a, Vec<T> b) {
  return b == kNegInf<T> ? b : a == kNegInf<T> ? a : a + b;
}

// Adds a mask with one element per key. Returns how many elements this mask alone hides.
template <class T, class M>
inline TileMask add_keys_as(const MaskParams& keys, const TileFrame& f, T* dst) {
  constexpr int L = kLanes<T>;
  const M* src = static_cast<const M*>(keys.data) + f.b * keys.stride_b + f.j0 * keys.stride_k;
  MaskedAndNot<T> seen;
  auto bias_of = [&](int64_t key) { return seen.record(splat<T>(scalar_as<T>(src[key * keys.stride_k]))); };
  auto add = [&](int64_t r, int64_t c, Vec<T> bias) {
    store<T>(dst + r * f.ld + c, add_bias<T>(load<T>(dst + r * f.ld + c), bias));
  };
  if (f.lanes_are_queries) {
    for (int64_t r = 0; r < f.rows(); ++r) {
      const Vec<T> bias = bias_of(r);
      for (int64_t c = 0; c < f.ld; c += L) add(r, c, bias);
    }
    return seen.of_tile();
  }
  for (int64_t c = 0; c < f.lanes(); c += L) {
    Vec<T> bias = {};
    for (int64_t i = 0; i < std::min<int64_t>(L, f.lanes() - c); ++i) bias[i] = bias_of(c + i)[0];
    for (int64_t r = 0; r < f.rows(); ++r) add(r, c, bias);
  }
  return seen.of_tile();
}

template <class T>
inline TileMask add_keys(const MaskParams& keys, const TileFrame& f, T* dst) {
#if defined(FA_TILE_FUNCTIONS)
  return FA_TILE_FUNCTIONS->add_keys(keys, f, dst);
#else
  return for_float_mask<T>(keys.dtype,
                           [&](auto element) { return add_keys_as<T, decltype(element)>(keys, f, dst); });
#endif
}

// Fills dst[row][lane] with the bias of a float mask.
template <class T>
inline TileMask load_bias_tile(const MaskParams& mask, const TileFrame& f, T* dst) {
#if defined(FA_TILE_FUNCTIONS)
  return FA_TILE_FUNCTIONS->load_bias_tile(mask, f, dst);
#else
  return for_float_mask<T>(mask.dtype,
                           [&](auto element) { return load_bias_as<T, decltype(element)>(mask, f, dst); });
#endif
}

// Returns bits: bit c is p[c] != 0, for c < n <= 64.
inline uint64_t bits_of_bytes(const uint8_t* p, int64_t n) {
  uint8_t tail[64] = {};
  if (n < 64) {
    std::memcpy(tail, p, n);
    p = tail;
  }
#if defined(FA_BITS_OF_64_BYTES)
  return FA_BITS_OF_64_BYTES(p);
#else
  uint64_t bits = 0;
  for (int c = 0; c < 64; ++c) bits |= uint64_t(p[c] != 0) << c;
  return bits;
#endif
}

// The visible keys of the tile, as one bit per query and key.
struct VisibleKeys {
  static constexpr int kWord = 32;  // bits per word, equal to the bits of a float32 lane
  static constexpr int kKeys = 2 * kWord;

  uint32_t* words =
      nullptr;  // [2][ld]: bit c % 32 of words[c / 32 * ld + query] is key c; null: no bool mask
  int64_t ld = 0;
  int64_t first_query = 0, first_key = 0;  // of a part of the tile; first_key: a multiple of the lanes

  explicit operator bool() const { return words != nullptr; }
  bool sees(int64_t query, int64_t key) const { return bits(query) >> key & 1; }

  // The keys that one query sees, as bits.
  uint64_t bits(int64_t query) const {
    const uint32_t* low = words + first_query + query;
    return (low[0] | uint64_t{low[ld]} << kWord) >> first_key;
  }
  void set_bits(int64_t query, uint64_t bits) const {
    uint32_t* low = words + first_query + query;
    low[0] = static_cast<uint32_t>(bits << first_key);
    low[ld] = static_cast<uint32_t>(bits << first_key >> kWord);
  }

  // Sets scores of one tile row to -inf where the key is not visible to the query.
  template <class T>
  void hide(const TileFrame& f, int64_t r, T* scores) const {
    using Bits = VecBits<T>;
    constexpr int L = kLanes<T>;
    const Bits one = Bits{} + 1;
    for (int64_t c = 0; c < f.ld; c += L) {
      Bits seen;
      if (f.lanes_are_queries) {
        typedef uint32_t Words __attribute__((vector_size(4 * L)));
        Words queries;
        const int64_t key = first_key + r;
        std::memcpy(&queries, words + key / kWord * ld + first_query + c, sizeof queries);
        seen = __builtin_convertvector(queries, Bits) & (one << (key % kWord));
      } else {
        const int64_t key = first_key + c;
        const uint32_t keys = words[key / kWord * ld + first_query + r] >> (key % kWord);
        seen = (Bits{} + keys) & (one << (Bits)iota<T>());
      }
      store<T>(scores + c, seen == Bits{} ? splat<T>(kNegInf<T>) : load<T>(scores + c));
    }
  }
};

// Returns the visible keys of one query as bits. `src` is its first element in a bool mask.
inline uint64_t visible_bits(const uint8_t* src, int64_t stride, int64_t keys, uint64_t every_key) {
  if (stride == 1) return bits_of_bytes(src, keys);
  if (stride == 0) return *src ? every_key : 0;
  uint64_t bits = 0;
  for (int64_t c = 0; c < keys; ++c) bits |= uint64_t(src[c * stride] != 0) << c;
  return bits;
}

// If `combine`, the words contain the keys visible under another mask: a key stays visible if both masks show it.
inline TileMask load_visible_keys(const MaskParams& mask, const TileFrame& f, const VisibleKeys& visible,
                                  bool known) {
  const uint8_t* src = static_cast<const uint8_t*>(mask.data) + f.b * mask.stride_b + f.h * mask.stride_h +
                       f.i0 * mask.stride_q + f.j0 * mask.stride_k;
  const uint64_t every_key = f.keys == 64 ? ~uint64_t{0} : (uint64_t{1} << f.keys) - 1;
  uint64_t bits = 0, seen_by_all = every_key, seen_by_any = 0;
  for (int64_t i = 0; i < f.queries; ++i) {
    if (i == 0 || mask.stride_q != 0) {
      __builtin_prefetch(src + i * mask.stride_q + 64 * mask.stride_k);  // prefetches the next tile
      bits = visible_bits(src + i * mask.stride_q, mask.stride_k, f.keys, every_key);
    }
    uint32_t &low = visible.words[i], &high = visible.words[visible.ld + i];
    const uint64_t left = known ? bits & (low | uint64_t{high} << VisibleKeys::kWord) : bits;
    low = static_cast<uint32_t>(left);
    high = static_cast<uint32_t>(left >> VisibleKeys::kWord);
    seen_by_all &= left;
    seen_by_any |= left;
  }
  return seen_by_any == 0 ? TileMask::kAll : seen_by_all == every_key ? TileMask::kNone : TileMask::kSome;
}

struct KeptMasks;  // kept_masks-inl.h

// Memory for functions of the user on one tile.
template <class T>
struct FunctionMemory {
  const KeptMasks* kept = nullptr;  // the table of this thread
  ProgramMemory<T> program;
  VisibleKeys visible;      // keys that the block mask and the mask function show
  T* old_scores = nullptr;  // [row][lane]: scores before the function, which its derivative needs
};

// The masks of one tile: a bias, bits, or both. A mask that hides nothing has no entry.
template <class T>
struct MaskTile {
  TileMask masked = TileMask::kNone;
  T* bias = nullptr;  // [row][lane]
  VisibleKeys visible;
  const MaskParams* in_place = nullptr;  // a mask that finish_scores() reads in place
  FunctionMemory<T> functions;
  Range seen_keys{};  // a mask of functions hides all other keys of the tile; empty: there is no such mask

  bool hides(const TileFrame& f, int64_t row, int64_t lane) const {
    if (visible && !(f.lanes_are_queries ? visible.sees(lane, row) : visible.sees(row, lane))) return true;
    if (in_place) return hides_in_place<T>(*in_place, f, row, lane);
    return bias && bias[row * f.ld + lane] == kNegInf<T>;
  }

  // Combines one more mask with this tile. `memory` comes from allocate_mask_tile().
  void add(const MaskParams& mask, const TileFrame& f, const MaskTile& memory) {
    if (mask.dtype == DType::kBool) {
      const TileMask left = load_visible_keys(mask, f, memory.visible, bool(visible));
      if (left == TileMask::kNone) return;
      visible = memory.visible;
      masked = masked == TileMask::kAll ? masked : left;
      return;
    }
    const TileMask own = bias ? add_keys<T>(mask, f, memory.bias) : load_bias_tile<T>(mask, f, memory.bias);
    bias = memory.bias;
    if (own == TileMask::kAll || masked == TileMask::kNone) masked = own;
  }
};

// Allocates memory for the mask on tiles of `queries` x `keys`.
template <class T>
MaskTile<T> allocate_mask_tile(Arena& arena, const MaskParams& mask, int64_t queries, int64_t keys) {
  MaskTile<T> memory;
  const auto any = [&](bool is_bool) {
    return (mask && (mask.dtype == DType::kBool) == is_bool) ||
           (mask.key_data && (mask.key_dtype == DType::kBool) == is_bool);
  };
  if (any(true)) {
    memory.visible.ld = round_up_to_lanes<T>(queries);
    memory.visible.words = arena.take<uint32_t>(2 * memory.visible.ld);
  }
  if (any(false)) memory.bias = arena.take<T>(queries * round_up_to_lanes<T>(keys));
  return memory;
}

template <class T>
inline MaskTile<T> load_mask_tile(const MaskParams& mask, const TileFrame& f, const MaskTile<T>& memory) {
  MaskTile<T> tile;
  if (mask) tile.add(mask, f, memory);
  if (mask.key_data) tile.add(mask.of_keys(), f, memory);
  return tile;
}

// Returns whether the call's mask may hide a key before key j. A tree mask begins at the first new key.
inline bool is_masked_before(const AttentionParams& p, int64_t j) {
  return p.mask && !(p.varlen.cache.tree_mask && j <= p.varlen.cache.first_masked);
}

// Shifts the mask of a tile's last keys by `before` keys. The first `before` keys are visible and have a bias of 0.
template <class T>
inline void shift_mask_tile(const TileFrame& f, int64_t before, const MaskTile<T>& tile) {
  for (int64_t i = 0; tile.visible && i < f.queries; ++i) {
    uint32_t *low = tile.visible.words + i, *high = low + tile.visible.ld;
    const uint64_t bits =
        (uint64_t{*high} << VisibleKeys::kWord | *low) << before | ((uint64_t{1} << before) - 1);
    *low = static_cast<uint32_t>(bits);
    *high = static_cast<uint32_t>(bits >> VisibleKeys::kWord);
  }
  if (!tile.bias) return;
  const int64_t rows = f.lanes_are_queries ? 1 : f.queries, key_stride = f.lanes_are_queries ? f.ld : 1;
  for (int64_t r = 0; r < rows; ++r) {
    T* row = tile.bias + r * f.ld;
    std::memmove(row + before * key_stride, row, (f.keys - before) * key_stride * sizeof(T));
    std::fill(row, row + before * key_stride, T(0));
  }
}

// Loads the mask of one tile, including tree masks and masks that are read in place.
template <class T>
inline MaskTile<T> load_mask_tile(const AttentionParams& p, const TileFrame& f, const MaskTile<T>& memory) {
  if (!is_masked_before(p, f.j0 + f.keys)) return {};
  if (is_read_in_place(p, f)) {
    const bool hidden = hides_in_place<T>(p.mask, f);
    return {hidden ? TileMask::kAll : TileMask::kNone, nullptr, {}, &p.mask, {}};
  }
  const CacheParams& cache = p.varlen.cache;
  if (!cache.tree_mask) return load_mask_tile<T>(p.mask, f, memory);
  const int64_t before = clamp_to(cache.first_masked - f.j0, 0, f.keys);
  TileFrame masked = f;
  masked.j0 = f.j0 + before - cache.first_masked;
  masked.keys = f.keys - before;
  MaskTile<T> tile = load_mask_tile<T>(p.mask, masked, memory);
  if (before == 0) return tile;
  shift_mask_tile<T>(f, before, tile);
  if (tile.masked == TileMask::kAll) tile.masked = TileMask::kSome;
  return tile;
}
