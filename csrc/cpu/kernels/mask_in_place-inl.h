// A float mask that the forward reads where it lies, and only once: it is added to S^T behind the product, and asked for
// while the product goes on. A tile of it in memory of our own would cost a second look at each element, and room in L1.
#pragma once

#include "bias-inl.h"
#include "tiling-inl.h"

// One float mask whose rows are the tile's lanes. A second mask, or a tree's, is added up in a tile of our own.
inline bool is_read_in_place(const AttentionParams& p, const TileFrame& f) {
  const MaskParams& mask = p.mask;
  return mask && mask.dtype != DType::kBool && !mask.key_data && !p.varlen.cache.tree_mask &&
         f.lanes_are_queries && mask.stride_k == 1 && mask.stride_q != 0;
}

// Whether it masks the whole tile. Nearly always the first vector says that it does not. A tile whose last vector is a
// partial one counts as visible somewhere: what is missing reads as 0.
template <class T>
inline bool hides_in_place(const MaskParams& mask, const TileFrame& f) {
  return for_float_mask(mask.dtype, [&](auto element) {
    constexpr int64_t L = kLanes<T>;
    const auto* src = mask_at<decltype(element)>(mask, f);
    MaskedAndNot<T> first, all;
    first.pass(load_bias<T, NextTile::kAskFor>(src, std::min(L, f.keys)));
    if (first.some_visible()) return false;
    for (int64_t i = 0; i < f.queries; ++i)
      for (int64_t c = 0; c < f.keys; c += L)
        all.pass(load_bias<T, NextTile::kAskFor>(src + i * mask.stride_q + c, std::min(L, f.keys - c)));
    return !all.some_visible();
  });
}

// Whether it masks one element.
template <class T>
inline bool hides_in_place(const MaskParams& mask, const TileFrame& f, int64_t row, int64_t lane) {
  return for_float_mask(mask.dtype, [&](auto element) {
    return scalar_as<T>(mask_at<decltype(element)>(mask, f)[lane * mask.stride_q + row]) == kNegInf<T>;
  });
}

// Adds it to the scores of a tile. Whether it masks any of them.
template <class T>
inline bool add_in_place(const MaskParams& mask, const TileFrame& f, T* scores) {
  return for_float_mask(mask.dtype, [&](auto element) {
    const auto add = [&](int64_t row, int64_t lane, Vec<T> bias) FA_INLINE_LAMBDA {
      T* at = scores + row * f.ld + lane;
      store<T>(at, masked_sum<T>(load<T>(at), bias));
    };
    const auto* src = mask_at<decltype(element)>(mask, f);
    return for_each_transposed<T, NextTile::kNotYet>(src, mask.stride_q, f.queries, f.keys, add)
        .some_masked();
  });
}

// The lines of memory in which a tile of it lies, row by row.
class MaskLines {
 public:
  // None, where the mask is not read in place.
  MaskLines(const AttentionParams& p, const TileFrame& f) {
    if (!is_read_in_place(p, f)) return;
    for_float_mask(p.mask.dtype, [&](auto element) {
      row_ = reinterpret_cast<const char*>(mask_at<decltype(element)>(p.mask, f));
      stride_ = p.mask.stride_q * static_cast<int64_t>(sizeof element);
      bytes_ = f.keys * static_cast<int64_t>(sizeof element);
    });
    rows_ = f.queries;
    at_ = first_line();
  }

  // At most: a row may begin in the middle of a line.
  int64_t count() const { return rows_ * (bytes_ / kLine + 1); }

  // Asks for the next ones. Always inline: see Prefetcher.
  FA_INLINE void lines(int64_t count) {
    for (int64_t n = 0; n < count && rows_ > 0; ++n) {
      __builtin_prefetch(at_, 0, kPrefetchLevel);
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
