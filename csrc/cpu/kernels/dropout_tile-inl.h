// Factors of dropout for one tile. Philox words (core/philox.h) are computed for a vector of Philox calls at
// once.
#pragma once

#include "frame-inl.h"

// 64-bit lanes with 32-bit words, for multiplications 32 x 32 -> 64 bits.
using Words = VecBits<double>;
constexpr int kCalls = kLanes<double>;

// Returns the full products of the low halves of the lanes.
FA_INLINE Words multiply_low_halves(Words a, Words b) {
#if defined(FA_MUL_EPU32)
  return (Words)FA_MUL_EPU32(a, b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// philox4x32() of core/philox.h for a vector of counters. The words are in the low halves of the lanes; the high
// halves are 0.
FA_INLINE void philox_words(PhiloxKey key, Words c0, Words c1, Words c2, Words (&out)[4]) {
  constexpr uint64_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
  Words c3 = Words{} + key.counter3;
  uint32_t k0 = key.k0, k1 = key.k1;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Words p0 = multiply_low_halves(c0, Words{} + kMul0), p1 = multiply_low_halves(c2, Words{} + kMul1);
    c0 = (p1 >> 32) ^ c1 ^ uint64_t{k0};
    c2 = (p0 >> 32) ^ c3 ^ uint64_t{k1};
    c1 = p1;  // the multiplication and the final mask ignore the high halves
    c3 = p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const Words* const words[] = {&c0, &c1, &c2, &c3};
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) out[w] = *words[w] & 0xffffffffu;
}

// Returns `keep` in the lanes of `kept` with all bits set, and 0 in the other lanes.
FA_INLINE Vec<double> keep_where(Words kept, double keep) { return (Vec<double>)(kept & (Words)splat(keep)); }
FA_INLINE auto keep_where(Words kept, float keep) {
  typedef uint32_t Narrow __attribute__((vector_size(kCalls * 4)));
  typedef float Floats __attribute__((vector_size(kCalls * 4)));
  return (Floats)(__builtin_convertvector(kept, Narrow) & (Narrow)(Floats{} + keep));
}

// Computes the keep factors of 16 queries from i on and kLanes keys from j on, one row per key. One vector of Philox
// calls contains the queries t, t + 1, ... and the queries t + 8, t + 9, ..., for two keys.
template <class T>
FA_INLINE void dropout_block(const AttentionParams& p, PhiloxKey key, uint32_t head_index, int64_t i,
                             int64_t j, T (&block)[kLanes<T>][16]) {
  const T keep = static_cast<T>(p.dropout.keep_scale);
  for (int n = 0; n < kLanes<T>; n += 2)
#pragma GCC unroll 4
    for (int t = 0; t < 8; t += kCalls) {
      const Words row = (Words)iota<double>() + static_cast<uint64_t>(i / 2 + t);
      Words words[4];
      philox_words(key, Words{} + static_cast<uint64_t>((j + n) >> 1), row, Words{} + head_index, words);
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) {
        const auto factor = keep_where((Words)(words[w] >= p.dropout.threshold), keep);
        std::memcpy(&block[n + (w & 1)][(w >> 1) * 8 + t], &factor, sizeof(factor));
      }
    }
}

// For a part of a larger call: a tile that does not begin at the start of the larger call's Philox block. Computes
// whole blocks and copies the part of each block inside the tile.
template <class T>
inline void load_dropout_tile_across_blocks(const AttentionParams& p, const TileFrame& f, PhiloxKey key,
                                            uint32_t head_index, int64_t i0, int64_t j0, T* dst) {
  constexpr int64_t L = kLanes<T>;
  for (int64_t r = 0; r < f.rows(); ++r)  // padding lanes are multiplied, too
    std::fill(dst + r * f.ld + f.lanes(), dst + (r + 1) * f.ld, T(0));
  for (int64_t i = i0 & ~int64_t{15}; i < i0 + f.queries; i += 16)
    for (int64_t j = j0 & ~int64_t{1}; j < j0 + f.keys; j += L) {
      T block[L][16];
      dropout_block<T>(p, key, head_index, i, j, block);
      for (int64_t n = std::max<int64_t>(j0 - j, 0); n < L && j + n < j0 + f.keys; ++n)
        for (int64_t c = std::max<int64_t>(i0 - i, 0); c < 16 && i + c < i0 + f.queries; ++c) {
          const int64_t query = i + c - i0, at_key = j + n - j0;
          dst[f.lanes_are_queries ? at_key * f.ld + query : query * f.ld + at_key] = block[n][c];
        }
    }
}

// Fills dst[row][lane]: 1 / (1 - p) for kept elements, 0 for dropped elements.
template <class T>
inline void load_dropout_tile(const AttentionParams& p, const TileFrame& f, T* dst) {
#if defined(FA_TILE_FUNCTIONS)
  FA_TILE_FUNCTIONS->load_dropout_tile(p, f, dst);
#else
  constexpr int L = kLanes<T>;
  const PhiloxKey key = philox_key(p.dropout.rng_state[0], p.dropout.rng_state[1]);
  const auto head_index = static_cast<uint32_t>(p.dropout.head(f.b, f.h, p.sizes.heads));
  const int64_t i0 = p.dropout.row(f.i0), j0 = p.dropout.col(f.j0);
  if (i0 % 16 != 0 || j0 % 2 != 0) return load_dropout_tile_across_blocks(p, f, key, head_index, i0, j0, dst);
  for (int64_t i = 0; i < f.queries; i += 16)
    for (int64_t j = 0; j < f.keys; j += L) {
      T block[L][16];
      dropout_block<T>(p, key, head_index, i0 + i, j0 + j, block);
      for (int64_t c = 0; c < 16 && i + c < f.queries; c += L) {  // kLanes queries
        if (f.lanes_are_queries) {
          for (int64_t n = 0; n < L && j + n < f.keys; ++n)
            store<T>(dst + (j + n) * f.ld + i + c, load<T>(&block[n][c]));
        } else {
          Vec<T> rows[L];
#pragma GCC unroll 16
          for (int n = 0; n < L; ++n) rows[n] = load<T>(&block[n][c]);
          transpose<T>(rows);
#pragma GCC unroll 16
          for (int n = 0; n < L; ++n)
            if (i + c + n < f.queries) store<T>(dst + (i + c + n) * f.ld + j, rows[n]);
        }
      }
    }
#endif
}

// The same for one query and any list of keys: rows are keys, lanes are heads from f.h on.
template <class T>
inline void load_dropout_of_keys(const AttentionParams& p, const TileFrame& f, const int32_t* keys, T* dst) {
  const DropoutParams own = p.dropout.at_row(f.i0);
  const PhiloxKey key = philox_key(own.rng_state[0], own.rng_state[1]);
  const int64_t i = own.row(f.i0), first_head = own.head(f.b, f.h, p.sizes.heads);
  const Words row = Words{} + static_cast<uint64_t>((i >> 4) * 8 + (i & 7));
  for (int64_t r = 0; r < f.keys; ++r) {
    const int64_t j = own.col(keys[r]);
    for (int64_t c = 0; c < f.ld; c += kCalls) {
      const Words heads = (Words)iota<double>() + static_cast<uint64_t>(first_head + c);
      Words words[4];
      philox_words(key, Words{} + static_cast<uint64_t>(j >> 1), row, heads, words);
      const Words kept = (Words)(words[dropout_word_index(i, j)] >= own.threshold);
      const auto factor = keep_where(kept, static_cast<T>(own.keep_scale));
      std::memcpy(dst + r * f.ld + c, &factor, sizeof(factor));
    }
  }
}

// rows *= factors, over whole vectors.
template <class T>
inline void multiply_rows(T* rows, const T* factors, int64_t count) {
  for (int64_t n = 0; n < count; n += kLanes<T>) store<T>(rows + n, load<T>(rows + n) * load<T>(factors + n));
}
