// Elements of a float mask (the bias): values added to the scores, -inf for masked elements.
#pragma once

#include "../vec/convert-inl.h"
#include "frame-inl.h"

// Calls body(M{}), where M is the element type of a float mask: float32, or the type of the queries (ops/checks). So
// 16-bit masks have no code for float64 accumulators T, and float64 masks have none for float32 accumulators.
template <class T, class Body>
inline auto for_float_mask(DType dtype, const Body& body) {
  if constexpr (std::is_same_v<T, double>) {
    if (dtype == DType::kFloat64) return body(double{});
  } else {
    if (dtype == DType::kBFloat16) return body(BFloat16{});
    if (dtype == DType::kFloat16) return body(Float16{});
  }
  return body(float{});
}

// Returns the index of the first element of a tile.
inline int64_t mask_index(const MaskParams& mask, const TileFrame& f) {
  return f.b * mask.stride_b + f.h * mask.stride_h + f.i0 * mask.stride_q + f.j0 * mask.stride_k;
}

// Returns a pointer to this element.
template <class M>
inline const M* mask_at(const MaskParams& mask, const TileFrame& f) {
  return static_cast<const M*>(mask.data) + mask_index(mask, f);
}

// kYes: reading a tile also prefetches the same rows of the next tile.
enum class Prefetch { kNo, kYes };

// Loads kLanes<T> consecutive elements of a float mask. Lanes beyond the end of a row read 0.
template <class T, Prefetch kNext, class M>
FA_INLINE Vec<T> load_bias(const M* p, int64_t n) {
  constexpr int L = kLanes<T>, kTile = 64;
  if constexpr (kNext == Prefetch::kYes) __builtin_prefetch(p + kTile);
  if constexpr (std::is_same_v<M, T> || (std::is_same_v<T, float> && sizeof(M) == 2)) {
    return n == L ? load_as<M, T>(p) : load_tail_as<M, T>(p, n);
  } else {  // a float32 mask with float64 inputs
    Vec<T> value = {};
    for (int64_t i = 0; i < n; ++i) value[i] = scalar_as<T>(p[i]);
    return value;
  }
}

// Records whether any element was masked, and whether any was visible. Compares bits as integers, without converting
// them.
template <class T>
struct MaskedAndNot {
  using Bits = VecBits<T>;
  Bits least = ~Bits{}, any = {};  // bits that differ from -inf: the minimum, and the OR, over all elements

  FA_INLINE Vec<T> record(Vec<T> bias) {
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

// dst[r][c] = bias of src[r][c]. Rows of the tile are rows of the mask.
template <class T, class M>
inline void load_bias_rows(const M* src, int64_t stride, int64_t rows, int64_t cols, T* dst, int64_t ld,
                           MaskedAndNot<T>& seen) {
  constexpr int L = kLanes<T>;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; c += L)
      store<T>(dst + r * ld + c, seen.record(load_bias<T, Prefetch::kYes>(src + r * stride + c,
                                                                          std::min<int64_t>(L, cols - c))));
}

// Calls use(c, r, bias of src[r][c], src[r + 1][c], ...). Lanes of the tile are rows of the mask.
template <class T, Prefetch kNext, class M, class Use>
FA_INLINE MaskedAndNot<T> for_each_transposed(const M* src, int64_t stride, int64_t rows, int64_t cols,
                                              const Use& use) {
  constexpr int64_t L = kLanes<T>;
  MaskedAndNot<T> seen;
  const auto transpose_block = [&](int64_t r0, int64_t c0, int64_t height, int64_t width) FA_INLINE_LAMBDA {
    const M* p = src + r0 * stride + c0;
    Vec<T> block[L];
#pragma GCC unroll 16
    for (int r = 0; r < L; ++r, p += stride)
      block[r] = r < height ? seen.record(load_bias<T, kNext>(p, width)) : Vec<T>{};
    transpose<T>(block);
#pragma GCC unroll 16
    for (int c = 0; c < L; ++c)
      if (c < width) use(c0 + c, r0, block[c]);
  };
  for (int64_t r = 0; r < rows; r += L)
    for (int64_t c = 0; c < cols; c += L) {
      const int64_t height = std::min(L, rows - r), width = std::min(L, cols - c);
      if (height == L && width == L)
        transpose_block(r, c, L, L);  // constant sizes: no branch for each row
      else
        transpose_block(r, c, height, width);
    }
  return seen;
}

// Adds the bias to scores. A bias of -inf gives -inf, even if the score is NaN or +inf.
template <class T>
FA_INLINE Vec<T> masked_sum(Vec<T> scores, Vec<T> bias) {
  return bias == kNegInf<T> ? bias : scores + bias;
}
