// The keys of each query row as sorted lists without duplicates.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../core/arena.h"
#include "../core/indexed.h"
#include "../core/mask.h"
#include "parallel.h"

namespace flash_attn_ext::cpu {

// The keys of one list inside a range, in ascending order.
class KeyCursor {
 public:
  // `entries`: ascending numbers of blocks of `block_size` keys.
  KeyCursor(const int32_t* entries, int64_t count, int64_t block_size, const Range& within)
      : at_(std::lower_bound(entries, entries + count, within.begin / block_size)),
        end_(std::lower_bound(at_, entries + count, (within.end + block_size - 1) / block_size)),
        block_size_(block_size),
        within_(within) {}

  // Writes the next keys, at most `most`. Returns their number; 0 at the end.
  int64_t next(int32_t* keys, int64_t most) {
    int64_t n = 0;
    if (block_size_ == 1) {
      n = std::min<int64_t>(most, end_ - at_);
      std::copy_n(at_, n, keys);
      at_ += n;
      return n;
    }
    for (; n < most && at_ < end_; ++at_, in_block_ = 0) {
      const int64_t block = *at_ * block_size_;
      int64_t key = std::max(block + in_block_, within_.begin);
      const int64_t block_end = std::min(block + block_size_, within_.end);
      for (; n < most && key < block_end; ++key) keys[n++] = static_cast<int32_t>(key);
      if (key < block_end) {
        in_block_ = key - block;
        break;
      }
    }
    return n;
  }

 private:
  const int32_t *at_, *end_;
  int64_t block_size_, in_block_ = 0;
  Range within_;
};

// Lists of all rows: the numbers of keys, or of blocks of keys.
struct KeyLists {
  const KeyIndices* indices = nullptr;
  int32_t* entries = nullptr;  // in the shape of the indices
  int32_t* lengths = nullptr;  // the length of each row's list
  uint64_t* bits = nullptr;    // scratch of each thread
  int64_t rows = 0;            // rows of all lists
  int64_t words = 0;           // 64-bit words of a thread's bits

  KeyCursor cursor(int64_t b, int64_t h_kv, int64_t i, const Range& within) const {
    const int64_t at = indices->row(b, h_kv, i);
    const int64_t length = indices->count == 0 ? 0 : lengths[at / indices->count];
    return {entries + at, length, indices->block_size, within};
  }
};

// `indices` must outlive the lists.
KeyLists allocate_key_lists(Arena& arena, const Sizes& sizes, const KeyIndices& indices, int threads);

// Sorts and removes duplicates: O(count + S_k / 64) for each row.
void fill_key_lists(const KeyLists& lists, const Parallel& parallel);

}  // namespace flash_attn_ext::cpu
