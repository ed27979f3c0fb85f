// Attention by index: each query names the keys that it may attend to. Torch-free, shared by every device.
#pragma once

#include "params.h"

namespace flash_attn_ext {

// The keys of each query row, (B or 1, 1 or H_kv, S_q, count), contiguous. A negative number is no key. A key that is
// named twice counts once, as in a mask. The order does not matter.
struct KeyIndices {
  Offsets numbers;
  int64_t stride_b = 0, stride_h = 0;  // 0: broadcast
  int64_t count = 0;                   // numbers of a row
  int64_t block_size = 1;  // number n names the keys [n * block_size, (n + 1) * block_size) that exist

  FA_HOST_DEVICE int64_t row(int64_t b, int64_t h_kv, int64_t i) const {
    return b * stride_b + h_kv * stride_h + i * count;
  }
};

struct IndexedParams : AttentionParams {
  KeyIndices indices;
};

struct IndexedBackwardParams : BackwardParams {
  KeyIndices indices;
};

}  // namespace flash_attn_ext
