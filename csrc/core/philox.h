// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). One word of its results decides
// whether dropout keeps element (row, column) of P.
//
// The word depends only on (seed, offset; batch, head, row, column). So tiling, number of threads and device do not
// change a mask. One call gives the words of a 2 x 2 block {i, i + 8} x {j, j + 1} with j even and i % 16 <
// 8. A CUDA thread holds one such 2 x 2 block of a 16 x 8 mma accumulator. On the CPU 16 rows are whole SIMD vectors.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flash_attn_ext {

struct PhiloxKey {
  uint32_t k0, k1, counter3;
};

struct PhiloxWords {
  uint32_t w[4];
};

FA_HOST_DEVICE inline PhiloxWords philox4x32(PhiloxKey key, uint32_t c0, uint32_t c1, uint32_t c2) {
  constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;    // from the paper
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;  // golden ratio, sqrt(3) - 1
  uint32_t c3 = key.counter3, k0 = key.k0, k1 = key.k1;
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{kMul0} * c0, p1 = uint64_t{kMul1} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += kWeyl0;
    k1 += kWeyl1;
  }
  return {{c0, c1, c2, c3}};
}

// An element's position leaves 32 bits of the counter, too few for the offset. So the generator itself makes a key from
// seed and offset. Any two states get keys that differ like random numbers.
FA_HOST_DEVICE inline PhiloxKey philox_key(int64_t seed, int64_t offset) {
  const auto s = static_cast<uint64_t>(seed), o = static_cast<uint64_t>(offset);
  const PhiloxKey state{static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32),
                        static_cast<uint32_t>(o >> 32)};
  const PhiloxWords words = philox4x32(state, static_cast<uint32_t>(o), 0, 0);
  return {words.w[0], words.w[1], words.w[2]};
}

// The words of the block that holds (row, col); `head_index` is b * H + h.
FA_HOST_DEVICE inline PhiloxWords dropout_words(PhiloxKey key, int64_t head_index, int64_t row, int64_t col) {
  return philox4x32(key, static_cast<uint32_t>(col >> 1), static_cast<uint32_t>((row >> 4) * 8 + (row & 7)),
                    static_cast<uint32_t>(head_index));
}

// The index of the word of (row, col), 0 to 3.
FA_HOST_DEVICE inline int dropout_word_index(int64_t row, int64_t col) {
  return static_cast<int>(((row >> 3) & 1) * 2 + (col & 1));
}

FA_HOST_DEVICE inline bool dropout_keeps(PhiloxKey key, uint64_t threshold, int64_t head_index, int64_t row,
                                         int64_t col) {
  const PhiloxWords words = dropout_words(key, head_index, row, col);
  const int n = dropout_word_index(row, col);
  // Not w[n]: on a GPU an index that is not a constant moves the array to memory.
  const uint32_t word = n < 2 ? (n == 0 ? words.w[0] : words.w[1]) : (n == 2 ? words.w[2] : words.w[3]);
  return word >= threshold;
}

}  // namespace flash_attn_ext
