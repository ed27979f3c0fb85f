#include "kvcache.h"

#include <ATen/ops/empty.h>

namespace flash_attn_ext {

CacheDType pack_cache_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar: return CacheDType::kInt8;
    case at::kFloat8_e4m3fn: return CacheDType::kFloat8E4M3;
    case at::kFloat8_e5m2: return CacheDType::kFloat8E5M2;
    default: return CacheDType::kOfQuery;
  }
}

CacheScale pack_scale(const OptionalTensor& t) {
  if (!t) return {};
  return {t->const_data_ptr<float>(), t->stride(0), t->stride(2), t->stride(1)};
}

AttentionResult empty_cache_result(const CacheTensors& in) {
  const c10::SymInt rows = in.query.sym_size(0), heads = in.query.sym_size(1);
  return {at::empty_symint({rows, heads, in.value.sym_size(3)}, in.query.options()),
          at::empty_symint({heads, rows}, in.query.options().dtype(accumulate_type(in.query)))};
}

CacheTensors to_kernel_layout(const CacheTensors& given) {
  CacheTensors in = given;
  for (at::Tensor* t : {&in.query, &in.key, &in.value}) *t = with_contiguous_rows(*t);
  for (at::Tensor* t : {&in.cu_seqlens_q, &in.seqused_k}) *t = t->contiguous();
  for (OptionalTensor* t : {&in.batch_idx, &in.leftpad, &in.block_table})
    if (*t) *t = (*t)->contiguous();
  for (OptionalTensor* t : {&in.alibi_slopes, &in.sink})
    if (*t) *t = (*t)->to(accumulate_type(in.query));
  return in;
}

PackedCache pack_cache(const CacheTensors& given, const CacheOptions& options,
                       const AttentionResult& result) {
  PackedCache packed;
  packed.tensors = to_kernel_layout(given);
  const CacheTensors& in = packed.tensors;

  AttentionTensors tensors;
  tensors.query = in.query.transpose(0, 1).unsqueeze(0);
  tensors.key = in.key.transpose(1, 2);
  tensors.value = in.value.transpose(1, 2);
  tensors.alibi_slopes = in.alibi_slopes;
  tensors.sink = in.sink;
  const bool by_row = in.tree_mask && in.tree_mask->dim() == 3;
  if (in.tree_mask) tensors.attn_mask = by_row ? in.tree_mask->unsqueeze(0) : *in.tree_mask;
  AttentionParams& p = packed.params;
  p = pack_attention(tensors, result.out.transpose(0, 1).unsqueeze(0), result.lse, options.attention());
  p.band.diagonal = pack_diagonal(options.attention());
  p.q.stride_b = p.out.stride_b = 0;
  VarlenParams& varlen = p.varlen;
  varlen.cu_seqlens_q = pack_offsets(in.cu_seqlens_q);
  varlen.seqused_k = pack_offsets(in.seqused_k);
  varlen.total_q = in.query.size(0);
  varlen.lower_right = options.lower_right;
  varlen.mask_by_row = by_row;
  varlen.cache.tree_mask = in.tree_mask.has_value();
  varlen.cache.batch_idx = pack_offsets(in.batch_idx);
  varlen.cache.leftpad = pack_offsets(in.leftpad);
  varlen.cache.caches = in.key.size(0);
  varlen.cache.dtype = pack_cache_dtype(in.key.scalar_type());
  varlen.cache.k_scale = pack_scale(in.key_scale);
  varlen.cache.v_scale = pack_scale(in.value_scale);
  if (in.block_table) {
    const int64_t pages = in.block_table->size(1);
    varlen.cache.pages = {pack_offsets(in.block_table), pages, in.key.size(1), in.key.size(0), 0};
    p.sizes.seqlen_k *= pages;
  }
  p.sizes.batch = in.cu_seqlens_q.size(0) - 1;
  if (options.max_seqlen_q) p.sizes.seqlen_q = std::min(p.sizes.seqlen_q, options.max_seqlen_q->expect_int());
  return packed;
}

}  // namespace flash_attn_ext
