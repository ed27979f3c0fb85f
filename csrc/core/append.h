// The arguments of the kernel that appends rows to caches. Torch-free.
#pragma once

#include "params.h"

namespace flash_attn_ext {

// Rotary tables: row n has the cosines or the sines of position n, in q's dtype or float32.
struct RotaryParams {
  const void *cos = nullptr, *sin = nullptr;  // null: no rotation
  int64_t cos_stride = 0, sin_stride = 0;     // distance of two rows
  int64_t pairs = 0;                          // of rotated columns, at the start of each head
  bool cos_is_float32 = false, sin_is_float32 = false;
  bool interleaved = true;  // true: pairs are columns (0, 1), (2, 3), ...; false: c and c + pairs

  explicit operator bool() const { return cos != nullptr; }
};

// Copies rows [cu_seqlens_new[b], cu_seqlens_new[b + 1]) of k and v to rows cache_seqlens[b], cache_seqlens[b] + 1, ... of
// sequence b's cache or pages. Rotates the rows of q, which cu_seqlens_q packs, and writes them to q_out.
struct AppendParams {
  DType dtype = DType::kFloat32;  // of q, k and v
  Sizes sizes;                    // batch: sequences; seqlen_q, seqlen_k: all rows of q and of k
  Tensor4 q, q_out, k, v;         // stride_b 0: packed
  Tensor4 k_cache, v_cache;       // stride_b: distance of two caches or of two pages
  Offsets cu_seqlens_q, cu_seqlens_new;
  Offsets cache_seqlens, rotary_seqlens;
  CacheParams cache;
  RotaryParams rotary;
  bool advance_query_positions = true;

  // The rotary position of the first new key of sequence b.
  int64_t first_position(int64_t b) const { return rotary_seqlens ? rotary_seqlens[b] : cache_seqlens[b]; }
};

}  // namespace flash_attn_ext
