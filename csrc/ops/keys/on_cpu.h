// Calls on caches that do not pass the dispatcher. The tensors are ordinary and on CPU, and no mode is active.
#pragma once

#include "../cache/append.h"

namespace flash_attn_ext {

// attention_cache with its checks. Writes out, a contiguous (T_q, H, D_v) tensor that shares no memory with an input.
void read_cache_on_cpu(const CacheTensors& given, const CacheOptions& options, const at::Tensor& out);
// append_to_cache with its checks.
AppendResult write_cache_on_cpu(const AppendTensors& given, const AppendOptions& options);

}  // namespace flash_attn_ext
