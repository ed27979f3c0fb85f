// The elements of a float mask: what is added to the scores, -inf where they are masked.
#pragma once

#include "../vec/convert-inl.h"
#include "frame-inl.h"

enum class TileMask { kNone, kSome, kAll };  // how many of a tile's elements are masked

// body(M{}), M the type of a float mask's elements.
template <class Body>
inline auto for_float_mask(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64: return body(double{});
    case DType::kBFloat16: return body(BFloat16{});
    case DType::kFloat16: return body(Float16{});
    case DType::kFloat32:
    case DType::kBool: break;  // kBool: its masks are bits, not a bias
  }
  return body(float{});
}

// The first element of a tile.
template <class M>
inline const M* mask_at(const MaskParams& mask, const TileFrame& f) {
  return static_cast<const M*>(mask.data) + f.b * mask.stride_b + f.h * mask.stride_h + f.i0 * mask.stride_q +
         f.j0 * mask.stride_k;
}

// Whether reading a tile asks for those elements of its rows that the next tile needs.
enum class NextTile { kNotYet, kAskFor };

// kLanes<T> elements of a float mask in a row; the missing ones of a tail read as 0.
template <class T, NextTile kNext, class M>
FA_INLINE Vec<T> load_bias(const M* p, int64_t n) {
  constexpr int L = kLanes<T>, kTile = 64;
  if constexpr (kNext == NextTile::kAskFor) __builtin_prefetch(p + kTile);
  if constexpr (std::is_same_v<M, T> || (std::is_same_v<T, float> && sizeof(M) == 2)) {
    return n == L ? load_as<M, T>(p) : load_tail_as<M, T>(p, n);
  } else {  // a float32 or 16-bit mask on float64 inputs
    Vec<T> value = {};
    for (int64_t i = 0; i < n; ++i) value[i] = scalar_as<T>(p[i]);
    return value;
  }
}

// Whether any of the elements that passed was masked, and any was not. By integers: they need no conversion of masks.
template <class T>
struct MaskedAndNot {
  using Bits = VecBits<T>;
  Bits least = ~Bits{}, any = {};  // of the bits in which elements differ from -inf

  FA_INLINE Vec<T> pass(Vec<T> bias) {
    const Bits differs = (Bits)bias ^ (Bits)splat<T>(kNegInf<T>);
    least = differs < least ? differs : least;
    any |= differs;
    return bias;
  }
  bool some_masked() const {
    bool found = false;
    for (int i = 0; i < kLanes<T>; ++i) found |= least[i] == 0;
    return found;
  }
  bool some_visible() const {
    bool found = false;
    for (int i = 0; i < kLanes<T>; ++i) found |= any[i] != 0;
    return found;
  }
  TileMask of_tile() const {
    return !some_visible() ? TileMask::kAll : some_masked() ? TileMask::kSome : TileMask::kNone;
  }
};

// dst[r][c] = bias of src[r][c]: rows of the tile are rows of the mask.
template <class T, class M>
inline void load_bias_rows(const M* src, int64_t stride, int64_t rows, int64_t cols, T* dst, int64_t ld,
                           MaskedAndNot<T>& seen) {
  constexpr int L = kLanes<T>;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; c += L)
      store<T>(dst + r * ld + c, seen.pass(load_bias<T, NextTile::kAskFor>(src + r * stride + c,
                                                                           std::min<int64_t>(L, cols - c))));
}

// use(c, r, bias of src[r][c], of src[r + 1][c], ...): lanes of the tile are rows of the mask.
template <class T, NextTile kNext, class M, class Use>
FA_INLINE MaskedAndNot<T> for_each_transposed(const M* src, int64_t stride, int64_t rows, int64_t cols,
                                              const Use& use) {
  constexpr int64_t L = kLanes<T>;
  MaskedAndNot<T> seen;
  const auto transpose_block = [&](int64_t r0, int64_t c0, int64_t height, int64_t width) FA_INLINE_LAMBDA {
    const M* p = src + r0 * stride + c0;
    Vec<T> block[L];
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r, p += stride)
      block[r] = r < height ? seen.pass(load_bias<T, kNext>(p, width)) : Vec<T>{};
    transpose<T>(block);
#pragma GCC unroll 16
    for (int c = 0; c < L; ++c)
      if (c < width) use(c0 + c, r0, block[c]);
  };
  for (int64_t r = 0; r < rows; r += L)
    for (int64_t c = 0; c < cols; c += L) {
      const int64_t height = std::min(L, rows - r), width = std::min(L, cols - c);
      if (height == L && width == L)
        transpose_block(r, c, L, L);  // sizes that the compiler knows: no branch for each row
      else
        transpose_block(r, c, height, width);
    }
  return seen;
}

// Scores with a bias: what it masks is masked, NaN and +inf included.
template <class T>
FA_INLINE Vec<T> masked_sum(Vec<T> scores, Vec<T> bias) {
  return bias == kNegInf<T> ? bias : scores + bias;
}
