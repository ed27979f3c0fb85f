// attn_mask on one tile: whatever its dtype and strides, as what is added to the scores, -inf where it masks.
#pragma once

#include "../vec/convert-inl.h"
#include "frame-inl.h"

enum class TileMask { kNone, kSome, kAll };  // how many of a tile's elements are masked

// kLanes<T> mask elements in a row; the missing ones of a tail read as 0 or false.
template <class T, class M>
FA_INLINE Vec<T> load_bias(const M* p, int64_t n) {
  constexpr int L = kLanes<T>;
  if constexpr (std::is_same_v<M, uint8_t>) {
    typedef uint8_t Bytes __attribute__((vector_size(L)));
    Bytes bytes = {};
    std::memcpy(&bytes, p, n == L ? L : n);
    return __builtin_convertvector(bytes, VecBits<T>) != 0 ? Vec<T>{} : splat<T>(kNegInf<T>);
  } else if constexpr (std::is_same_v<M, T> || (std::is_same_v<T, float> && sizeof(M) == 2)) {
    return n == L ? load_as<M, T>(p) : load_tail_as<M, T>(p, n);
  } else {  // a float32 or 16-bit mask on float64 inputs
    Vec<T> value = {};
    for (int64_t i = 0; i < n; ++i) value[i] = scalar_as<T>(p[i]);
    return value;
  }
}

// dst[r][c] = bias of src[r][c]: rows of the tile are rows of the mask.
template <class T, class M>
inline void load_bias_rows(const M* src, int64_t stride, int64_t rows, int64_t cols, T* dst, int64_t ld) {
  constexpr int L = kLanes<T>;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; c += L)
      store<T>(dst + r * ld + c, load_bias<T, M>(src + r * stride + c, std::min<int64_t>(L, cols - c)));
}

// dst[c][r] = bias of src[r][c]: lanes of the tile are rows of the mask.
template <class T, class M>
inline void load_bias_transposed(const M* src, int64_t stride, int64_t rows, int64_t cols, T* dst,
                                 int64_t ld) {
  constexpr int L = kLanes<T>;
  for (int64_t r0 = 0; r0 < rows; r0 += L)
    for (int64_t c0 = 0; c0 < cols; c0 += L) {
      Vec<T> block[L];
      const int64_t n = std::min<int64_t>(L, cols - c0);
#pragma GCC unroll 16
      for (int r = 0; r < L; ++r)
        block[r] = r0 + r < rows ? load_bias<T, M>(src + (r0 + r) * stride + c0, n) : Vec<T>{};
      transpose<T>(block);
#pragma GCC unroll 16
      for (int c = 0; c < L; ++c)
        if (c < n) store<T>(dst + (c0 + c) * ld + r0, block[c]);
    }
}

template <class T, class M>
inline TileMask load_mask_as(const MaskParams& mask, const TileFrame& f, T* dst) {
  constexpr int L = kLanes<T>;
  const M* src = static_cast<const M*>(mask.data) + f.b * mask.stride_b + f.h * mask.stride_h +
                 f.i0 * mask.stride_q + f.j0 * mask.stride_k;
  const int64_t row_stride = f.lanes_are_queries ? mask.stride_k : mask.stride_q;
  const int64_t lane_stride = f.lanes_are_queries ? mask.stride_q : mask.stride_k;
  const int64_t rows = f.rows(), lanes = f.lanes();
  if (lane_stride == 0) {
    for (int64_t r = 0; r < rows; ++r) {
      const T bias = load_bias<T, M>(src + r * row_stride, 1)[0];
      std::fill(dst + r * f.ld, dst + r * f.ld + f.ld, bias);
    }
  } else if (lane_stride == 1) {
    load_bias_rows<T, M>(src, row_stride, rows, lanes, dst, f.ld);
  } else if (row_stride == 1) {
    load_bias_transposed<T, M>(src, lane_stride, lanes, rows, dst, f.ld);
  } else {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < lanes; ++c)
        dst[r * f.ld + c] = load_bias<T, M>(src + r * row_stride + c * lane_stride, 1)[0];
  }

  VecIndex<T> any = {}, visible = {};
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < lanes; c += L) {
      const VecIndex<T> inside = c + L <= lanes ? VecIndex<T>{} - 1 : iota<T>() < static_cast<int>(lanes - c);
      const VecIndex<T> masked = load<T>(dst + r * f.ld + c) == kNegInf<T>;
      any |= masked & inside;
      visible |= ~masked & inside;
    }
  bool any_masked = false, any_visible = false;
  for (int i = 0; i < L; ++i) {
    any_masked |= any[i] != 0;
    any_visible |= visible[i] != 0;
  }
  return !any_visible ? TileMask::kAll : any_masked ? TileMask::kSome : TileMask::kNone;
}

// Fills dst[row][lane] with the mask's bias. Without a mask it does nothing.
template <class T>
inline TileMask load_mask_tile(const MaskParams& mask, const TileFrame& f, T* dst) {
  if (!mask) return TileMask::kNone;
  switch (mask.dtype) {
    case DType::kBool: return load_mask_as<T, uint8_t>(mask, f, dst);
    case DType::kFloat32: return load_mask_as<T, float>(mask, f, dst);
    case DType::kFloat64: return load_mask_as<T, double>(mask, f, dst);
    case DType::kBFloat16: return load_mask_as<T, BFloat16>(mask, f, dst);
    case DType::kFloat16: return load_mask_as<T, Float16>(mask, f, dst);
  }
  return TileMask::kNone;
}
