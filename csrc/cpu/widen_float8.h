// Widens float8 to 16 bits by tables of bytes. Needs AVX-512 VBMI, which no kernel table requires, so the kernels of
// AVX-512 call it through a pointer.
#pragma once

#include <cstdint>

namespace flash_attn_ext::cpu {

// The 16-bit value of each magnitude (the code without its sign), in two tables of bytes.
struct Float8Bytes {
  uint8_t low[128] = {}, high[128] = {};
};

// to[r][c] = the value of from[r][c]. `ld` and `stride`: the distance of rows in elements.
using WidenFloat8Rows = void(const Float8Bytes& bytes, const uint8_t* from, int64_t stride, int64_t rows,
                             int64_t cols, uint16_t* to, int64_t ld);

// Null if this CPU does not have AVX-512 VBMI.
WidenFloat8Rows* widen_float8_rows();

}  // namespace flash_attn_ext::cpu
