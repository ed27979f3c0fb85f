// A float mask that the forward reads once, directly from the caller's memory. It is added to S^T after the product,
// and prefetched during the product. A copied tile would need a second read of each element, and memory in L1.
#pragma once

#include "bias-inl.h"
#include "tiling-inl.h"

// Returns whether a mask is read in place: a single float mask, and rows of the mask are lanes of the tile. Two
// masks, or a tree mask, are summed in a copied tile.
inline bool is_read_in_place(const AttentionParams& p, const TileFrame& f) {
  const MaskParams& mask = p.mask;
  return mask && mask.dtype != DType::kBool && !mask.key_data && !p.varlen.cache.tree_mask &&
         f.lanes_are_queries && mask.stride_k == 1 && mask.stride_q != 0;
}

// Returns whether the mask hides the whole tile. Usually the first vector already has a visible element. A tile with a
// partial last vector counts as partly visible, because lanes beyond the end read 0.
template <class T>
inline bool hides_in_place(const MaskParams& mask, const TileFrame& f) {
  return for_float_mask<T>(mask.dtype, [&](auto element) {
    constexpr int64_t L = kLanes<T>;
    const auto* src = mask_at<decltype(element)>(mask, f);
    MaskedAndNot<T> first, all;
    first.record(load_bias<T, Prefetch::kYes>(src, std::min(L, f.keys)));
    if (first.some_visible()) return false;
    for (int64_t i = 0; i < f.queries; ++i)
      for (int64_t c = 0; c < f.keys; c += L)
        all.record(load_bias<T, Prefetch::kYes>(src + i * mask.stride_q + c, std::min(L, f.keys - c)));
    return !all.some_visible();
  });
}

// Returns whether the mask hides one element.
template <class T>
inline bool hides_in_place(const MaskParams& mask, const TileFrame& f, int64_t row, int64_t lane) {
  return for_float_mask<T>(mask.dtype, [&](auto element) {
    return scalar_as<T>(mask_at<decltype(element)>(mask, f)[lane * mask.stride_q + row]) == kNegInf<T>;
  });
}

// Adds the mask to the scores of a tile. Returns whether it hides any of them.
template <class T>
inline bool add_in_place(const MaskParams& mask, const TileFrame& f, T* scores) {
#if defined(FA_TILE_FUNCTIONS)
  return FA_TILE_FUNCTIONS->add_in_place(mask, f, scores);
#else
  return for_float_mask<T>(mask.dtype, [&](auto element) {
    const auto add = [&](int64_t row, int64_t lane, Vec<T> bias) FA_INLINE_LAMBDA {
      T* at = scores + row * f.ld + lane;
      store<T>(at, masked_sum<T>(load<T>(at), bias));
    };
    const auto* src = mask_at<decltype(element)>(mask, f);
    return for_each_transposed<T, Prefetch::kNo>(src, mask.stride_q, f.queries, f.keys, add).some_masked();
  });
#endif
}

// The cache lines of a tile of the mask, row by row.
class MaskLines {
 public:
  // Has no lines if the mask is not read in place.
  MaskLines(const AttentionParams& p, const TileFrame& f) {
    if (!is_read_in_place(p, f)) return;
    const MaskParams& mask = p.mask;
    const int64_t element = bytes_of(mask.dtype);
    row_ = static_cast<const char*>(mask.data) + mask_index(mask, f) * element;
    stride_ = mask.stride_q * element;
    bytes_ = f.keys * element;
    rows_ = f.queries;
    at_ = first_line();
  }

  // An upper bound: a row may begin in the middle of a line.
  int64_t count() const { return rows_ * (bytes_ / kLine + 1); }

  // Prefetches the next `count` lines. Always inline: see Prefetcher.
  FA_INLINE void lines(int64_t count) {
    for (int64_t n = 0; n < count && rows_ > 0; ++n) {
      __builtin_prefetch(at_, 0, kPrefetchIntoL2);
      at_ += kLine;
      if (at_ < row_ + bytes_) continue;
      row_ += stride_;
      at_ = first_line();
      --rows_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;

  const char* first_line() const { return row_ - reinterpret_cast<uintptr_t>(row_) % kLine; }

  const char *row_ = nullptr, *at_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0, rows_ = 0;
};
