// Cuts calls of few queries into blocks. Only shape and band decide, so results do not depend on the machine.
#pragma once

#include <cstddef>

#include "../../core/mask.h"
#include "../../core/params.h"

namespace flash_attn_ext::cuda::sm80 {

constexpr int kMmaRows = 16;   // query rows of a row tile: one mma
constexpr int kWarpKeys = 16;  // keys of a warp's tile: one mma
// With three warps two blocks fit an A100's multiprocessor, for every head dimension.
constexpr int kDecodeWarps = 3, kDecodeThreads = 32 * kDecodeWarps;
constexpr int kDecodeBlockKeys = kDecodeWarps * kWarpKeys;  // the warps divide the keys

struct DecodeSchedule {
  int64_t group;       // query heads that share a key head: their rows fill tiles together
  int64_t row_tiles;   // row tiles of a block
  int64_t row_blocks;  // per batch and key head
  int64_t tasks;       // row blocks of all batches and key heads
  Range keys;  // keys that some query sees, from a multiple of kWarpKeys on; packed: of the longest sequence
  int64_t splits;  // splits of these keys; combine.cu merges them
  int64_t keys_per_split;
};

// `widest_pair`: the largest head dimension at which a block may have two row tiles.
DecodeSchedule schedule_decode(const AttentionParams& p, int64_t widest_pair = 128);

// The bytes of a forward's workspace, if the forward decodes.
size_t decode_workspace(const AttentionParams& p, int64_t widest_pair = 128);

}  // namespace flash_attn_ext::cuda::sm80
