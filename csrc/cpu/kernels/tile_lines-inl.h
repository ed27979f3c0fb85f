// The cache lines of a tile of keys and values, for GradualPrefetch.
#pragma once

#include "cache_rows-inl.h"

class TileLines {
 public:
  // The rows of head `h_kv`: first the keys, then the values. null: no lines.
  TileLines(const TileSources* tile, int64_t h_kv) : h_kv_(h_kv) {
    if (!tile) return;
    for (const TileSource* part : {&tile->keys, &tile->values})
      if (part->known) parts_[part_count_++] = part;
  }

  int64_t count() const {
    int64_t lines = 0;
    for (int n = 0; n < part_count_; ++n) lines += parts_[n]->rows * ceil_div(parts_[n]->bytes, kLine);
    return lines;
  }

  // Prefetches the next `count` lines.
  void lines(int64_t count) {
    for (; count > 0 && (at_ < end_ || find_row()); --count, at_ += kLine)
      __builtin_prefetch(at_, 0, kPrefetchIntoL2);
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes

  bool find_row() {
    for (; part_ < part_count_; ++part_, row_ = 0)
      if (row_ < parts_[part_]->rows) {
        at_ = parts_[part_]->row(h_kv_, row_++);
        end_ = at_ + parts_[part_]->bytes;
        return true;
      }
    return false;
  }

  int64_t h_kv_;
  const TileSource* parts_[2];
  int part_count_ = 0, part_ = 0;
  int64_t row_ = 0;  // the next row of the part
  const char *at_ = nullptr, *end_ = nullptr;
};
