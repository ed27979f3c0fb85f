// The params of attention with integer products. Torch-free.
#pragma once

#include "params.h"

namespace flash_attn_ext {

// A forward with Q K^T in int8 and P V in int16. Without dropout, packed sequences, caches and functions of the user.
struct Int8Params : AttentionParams {};

}  // namespace flash_attn_ext
