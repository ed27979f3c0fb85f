// Transposes a tile of float8 values in shared memory. wgmma reads 8-bit operands along k only, and k counts the keys in
// O += P V. So V^T is needed, with adjacent keys in a row.
#pragma once

#include "../float8.h"
#include "panels.h"
#include "ptx.h"

namespace flash_attn_ext::cuda::sm90 {

// A row of V^T has the keys of each 32 in the order in which the threads of wgmma hold them. Thread t of four has the columns
// 8 n + 2 t and 8 n + 2 t + 1 of S, n = 0 to 3. As left operand of the second product it needs the columns 4 t to 4 t + 3
// and 16 + 4 t to 16 + 4 t + 3. So P moves to no other thread if place 4 t + e of V^T has key 2 t + e % 2 + e / 2 * 8, and
// place 16 + 4 t + e the key 16 later.

// Zeros the bytes of keys that do not exist. A word has the keys 0, 1, 8 and 9; `left`: so many keys exist from key 0 on.
__device__ inline uint32_t existing_keys(uint32_t word, int left) {
  const uint32_t first = left > 1 ? 0xffff : left > 0 ? 0xff : 0;
  const uint32_t second = left > 9 ? 0xffff : left > 8 ? 0xff : 0;
  return word & (first | second << 16);
}

// A warp's part: the blocks number `warp`, `warp` + kWarps, ... A block has 16 columns of two or three groups of
// 32 keys. `keys`: so many keys exist. The other keys become 0, because P is 0 there and 0 x NaN is NaN. In the
// swizzle, piece n of a row (16 bytes) is at the place of piece 0, XOR 16 n.
template <int kWarps, class From, class To>
__device__ void transpose_tile(const From& from, To& to, int warp, int keys) {
  constexpr int kAllGroups = From::kRows / 32, kGroups = kAllGroups % 2 == 0 ? 2 : 3;
  constexpr uint32_t kParts = kAllGroups / kGroups, kBlocks = kParts * To::kRows / 16,
                     kPieces = kPanelRowBytes / 16;  // of a row of a panel
  static_assert(kAllGroups % kGroups == 0 && To::kCount == 1);
  constexpr uint32_t kFirstColumn = 0x6420, kSecondColumn = 0x7531;  // of two bytes
  const int lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8, pair = lane % 4 * 2;
  // The lane's words of a matrix are row lane / 4. Rows 4 to 7 have their two columns exchanged: so the eight rows of a
  // matrix are in different banks.
  const bool exchanged = lane / 4 >= 4;
  const uint32_t first = exchanged ? kSecondColumn : kFirstColumn,
                 second = exchanged ? kFirstColumn : kSecondColumn;
  const int to_row = 2 * row + ((row >= 4) != (matrix >= 2));
  const uint32_t from_place = From::offset(lane, 0), to_place = To::offset(to_row, matrix % 2 * 16);
#pragma unroll 1
  for (uint32_t block = warp; block < kBlocks; block += kWarps) {  // unsigned: divisions are shifts
    const uint32_t first_key = block % kParts * kGroups * 32, piece = block / kParts;
    const unsigned char* rows =
        from.bytes[piece / kPieces] + first_key * kPanelRowBytes + (from_place ^ piece % kPieces * 16);
    unsigned char* to_rows = to.bytes[0] + piece * 16 * kPanelRowBytes;
    uint32_t x[kGroups][4];  // x[g][m]: keys 8 m + pair and the next key of a group, two columns of each
#pragma unroll
    for (int g = 0; g < kGroups; ++g)  // all loads come first, so that their latencies overlap
      ptx::ldmatrix_x4_trans(x[g], rows + 32 * g * kPanelRowBytes);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int key = static_cast<int>(first_key) + 32 * g;
      uint32_t y[4] = {ptx::choose_bytes(x[g][0], x[g][1], first), ptx::choose_bytes(x[g][2], x[g][3], first),
                       ptx::choose_bytes(x[g][0], x[g][1], second),
                       ptx::choose_bytes(x[g][2], x[g][3], second)};
      if (keys < key + 32) {
#pragma unroll
        for (int n = 0; n < 4; ++n) y[n] = existing_keys(y[n], keys - key - n % 2 * 16 - pair);
      }
      ptx::store_matrices(to_rows + (to_place ^ key), y);
    }
  }
}

}  // namespace flash_attn_ext::cuda::sm90
