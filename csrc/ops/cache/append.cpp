#include "append.h"

#include <ATen/ops/empty.h>

#include "../dense/pack_params.h"

namespace flash_attn_ext {
namespace {

// Packed rows (T, H, D) have batch stride 0.
Tensor4 pack_rows(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), 0, t.stride(1), t.stride(0)};
}

Tensor4 pack_cache_tensor(const at::Tensor& t) {
  return {t.mutable_data_ptr(), t.stride(0), t.stride(2), t.stride(1)};
}

}  // namespace

AppendResult AppendToCache::empty(const Tensors& in, const Options&) {
  c10::SymDimVector sizes(in.query.sym_sizes());
  if (!in.rotary_cos) sizes[0] = 0;
  return {at::empty_symint(sizes, in.query.options()),
          at::empty_symint(in.cache_seqlens.sym_sizes(), in.cache_seqlens.options())};
}

Packed<AppendToCache> AppendToCache::pack(const Tensors& given, const Options& options,
                                          const Result& result) {
  Packed<AppendToCache> packed{to_kernel_layout(given), {}, {}};
  const AppendTensors& in = packed.tensors;
  AppendParams& p = packed.params;
  p.dtype = pack_dtype(in.query.scalar_type());
  p.sizes = {in.cu_seqlens_q.size(0) - 1,
             in.query.size(1),
             in.key.size(1),
             in.query.size(0),
             in.key.size(0),
             in.query.size(2),
             in.value.size(2)};
  p.q = pack_rows(in.query);
  p.q_out = pack_rows(result.query);
  p.k = pack_rows(in.key);
  p.v = pack_rows(in.value);
  p.k_cache = pack_cache_tensor(in.key_cache);
  p.v_cache = pack_cache_tensor(in.value_cache);
  p.cu_seqlens_q = pack_offsets(in.cu_seqlens_q);
  p.cu_seqlens_new = pack_offsets(in.cu_seqlens_k_new);
  p.cache_seqlens = pack_offsets(in.cache_seqlens);
  p.rotary_seqlens = pack_offsets(in.rotary_seqlens);
  p.cache.batch_idx = pack_offsets(in.cache_batch_idx);
  p.cache.leftpad = pack_offsets(in.cache_leftpad);
  p.cache.caches = in.key_cache.size(0);
  p.cache.dtype = pack_cache_dtype(in.key_cache.scalar_type());
  p.cache.k_scale = pack_scale(in.key_scale);
  p.cache.v_scale = pack_scale(in.value_scale);
  p.cache.k_groups = pack_groups(in.key_cache, in.key_group_scale, in.key_group_zero);
  p.cache.v_groups = pack_groups(in.value_cache, in.value_group_scale, in.value_group_zero);
  if (in.block_table)
    p.cache.pages = {pack_offsets(in.block_table), in.block_table->size(1), in.key_cache.size(1),
                     in.key_cache.size(0), 0};
  if (in.rotary_cos) {
    const auto is_float32 = [](const at::Tensor& t) { return t.scalar_type() == at::kFloat; };
    p.rotary = {in.rotary_cos->const_data_ptr(), in.rotary_sin->const_data_ptr(),
                in.rotary_cos->stride(0),        in.rotary_sin->stride(0),
                in.rotary_cos->size(1),          is_float32(*in.rotary_cos),
                is_float32(*in.rotary_sin),      options.interleaved};
  }
  p.advance_query_positions = options.advance_query_positions;
  return packed;
}

}  // namespace flash_attn_ext
