// Storage of the 16-bit types; arithmetic happens in fp32 (vec/convert-inl.h).
#pragma once

#include <cstdint>

namespace flash_attn_ext::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

}  // namespace flash_attn_ext::cpu
