// The factor of <q, k>, and whether there is a softcap. The host computes both, too, so this header has no functions of the GPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "../core/params.h"

namespace flash_attn_ext::cuda {

// x > 0, for any x except NaN. An integer comparison, because most GPUs have 1/64 of the units for fp64.
FA_HOST_DEVICE inline bool is_positive(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits > 0;
}
FA_HOST_DEVICE inline bool has_softcap(const AttentionParams& p) { return is_positive(p.softcap); }

// The factor of <q, k> before softcap, ALiBi and mask. Divides in fp64. A kernel computes it once, before its loop.
template <class T>
FA_HOST_DEVICE T product_scale(const AttentionParams& p) {
  return static_cast<T>(has_softcap(p) ? p.scale / p.softcap : p.scale);
}

}  // namespace flash_attn_ext::cuda
