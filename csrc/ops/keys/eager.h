// A fast path from Python to the dispatcher.
#pragma once

#include <Python.h>

namespace flash_attn_ext {

// Each function runs an ordinary eager call. It returns None if a mode, a subclass or a transform must see the call. It also
// returns None if an argument does not have the operator's form: is_ordinary_tensor() in eager.cpp. Python then runs the call
// through torch.ops, which raises the errors.
//   flash_attn_if_ordinary   the positional arguments of flash_attn, and a dictionary of its keyword arguments. Returns out or
//                            (out, lse)
//   attention_if_ordinary    enable_gqa, return_lse, tensors..., options..., in the order of the schema. The same results
extern PyMethodDef kFlashAttnIfOrdinary, kAttentionIfOrdinary;
extern PyMethodDef kFlexIfOrdinary;    // as attention_if_ordinary, for attention_flex
extern PyMethodDef kVarlenIfOrdinary;  // as attention_if_ordinary, for attention_varlen

// eager_cache.cpp: calls on caches, CPU only. Each function returns None if the call is not ordinary, before it writes.
//   kvcache_if_ordinary      the arguments of flash_attn_with_kvcache that a decode step has. Returns out or (out, lse)
//   write_cache_if_ordinary  the tensors of append_to_cache. Returns True after it wrote the rows
//   read_cache_if_ordinary   out, the tensors of attention_cache, and a dictionary of its options. Writes out, returns True
extern PyMethodDef kKvcacheIfOrdinary, kWriteCacheIfOrdinary, kReadCacheIfOrdinary;

// eager_captured.cpp: captured_rows_if_ordinary(tensors, floats, ints, dtype) returns the operator's tensors `captured` and
// `captured_ints`, with their derivatives, or None. `floats` and `ints` are tuples of positions in a list of tensors, and
// `dtype` is the dtype of the accumulators. It returns None for tensors without plain elements on a CPU, and if a mode or a
// transform must see the conversions. It throws ValueError if an int64 element does not fit an int32 row.
extern PyMethodDef kCapturedRowsIfOrdinary;

}  // namespace flash_attn_ext
