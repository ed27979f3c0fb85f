// What the kernel that appends rows to caches is told. Torch-free.
#pragma once

#include "params.h"

namespace flash_attn_ext {

// Rotary tables: row n has the cosines or the sines of position n, of q's dtype or float32.
struct RotaryParams {
  const void *cos = nullptr, *sin = nullptr;  // null: nothing turns
  int64_t cos_stride = 0, sin_stride = 0;     // from row to row
  int64_t pairs = 0;                          // of columns that turn, at the start of each head
  bool cos_is_float32 = false, sin_is_float32 = false;
  bool interleaved = true;  // pairs are columns (0, 1), (2, 3), ...; otherwise c and c + pairs

  explicit operator bool() const { return cos != nullptr; }
};

// Rows [cu_seqlens_new[b], cu_seqlens_new[b + 1]) of k and v go behind the cache_seqlens[b] rows of sequence b's cache,
// or into its pages. The rows of q are packed likewise; rotated, they are written to q_out.
struct AppendParams {
  DType dtype = DType::kFloat32;  // of q, k and v
  Sizes sizes;                    // batch: sequences; seqlen_q, seqlen_k: all rows of q and of k
  Tensor4 q, q_out, k, v;         // stride_b 0: packed
  Tensor4 k_cache, v_cache;       // stride_b: from cache to cache, or from page to page
  Offsets cu_seqlens_q, cu_seqlens_new;
  Offsets cache_seqlens, rotary_seqlens;
  CacheParams cache;
  RotaryParams rotary;
  bool advance_query_positions = true;

  // The position by which the first new key of sequence b turns.
  int64_t first_position(int64_t b) const { return rotary_seqlens ? rotary_seqlens[b] : cache_seqlens[b]; }
};

}  // namespace flash_attn_ext
