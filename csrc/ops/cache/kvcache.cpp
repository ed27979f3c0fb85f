#include "kvcache.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "../dense/pack_params.h"

namespace flash_attn_ext {

CacheDType pack_cache_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kChar: return CacheDType::kInt8;
    case at::kFloat8_e4m3fn: return CacheDType::kFloat8E4M3;
    case at::kFloat8_e5m2: return CacheDType::kFloat8E5M2;
    case at::kByte: return CacheDType::kInt4;
    default: return CacheDType::kOfQuery;
  }
}

CacheScale pack_scale(const OptionalTensor& t) {
  if (!t) return {};
  return {t->const_data_ptr<float>(), t->stride(0), t->stride(2), t->stride(1)};
}

CacheGroups pack_groups(const at::Tensor& cache, const OptionalTensor& scales, const OptionalTensor& zeros) {
  if (!scales) return {};
  const auto pack = [](const at::Tensor& t) {
    return Tensor4{const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(2), t.stride(1)};
  };
  const int64_t count = scales->size(3);
  return {pack(*scales), zeros ? pack(*zeros) : Tensor4{}, count, 2 * cache.size(3) / count,
          scales->scalar_type() == at::kHalf};
}

c10::SymInt columns_of(const at::Tensor& cache) {
  return cache.scalar_type() == at::kByte ? 2 * cache.sym_size(3) : cache.sym_size(3);
}

AttentionResult AttentionCache::empty(const Tensors& in, const Options&) {
  const c10::SymInt rows = in.query.sym_size(0), heads = in.query.sym_size(1);
  return {at::empty_symint({rows, heads, columns_of(in.value)}, in.query.options()),
          at::empty_symint({heads, rows}, in.query.options().dtype(accumulate_type(in.query)))};
}

Packed<AttentionCache> AttentionCache::pack(const Tensors& given, const Options& options,
                                            const Result& result) {
  Packed<AttentionCache> packed{to_kernel_layout(given), {}, {}};
  const CacheTensors& in = packed.tensors;
  const int64_t sequences = in.cu_seqlens_q.size(0) - 1;
  const bool by_row = in.tree_mask && in.tree_mask->dim() == 3;

  AttentionTensors dense;
  dense.query = dense_view(in.query, sequences);
  dense.key = in.key.transpose(1, 2);
  dense.value = in.value.transpose(1, 2);
#define FA_COPY(name, ...) dense.name = in.name;
  FA_PER_HEAD(FA_COPY)
#undef FA_COPY
  if (in.tree_mask) dense.attn_mask = by_row ? in.tree_mask->unsqueeze(0) : *in.tree_mask;
  AttentionParams& p = packed.params;
  p = pack_attention(dense, dense_view(result.out, sequences), result.lse, options.attention());
  p.band.diagonal =
      pack_diagonal(options.attention());  // the kernels add each sequence's own lower-right shift
  if (options.max_seqlen_q) p.sizes.seqlen_q = std::min(p.sizes.seqlen_q, options.max_seqlen_q->expect_int());

  VarlenParams& varlen = p.varlen;
  varlen.cu_seqlens_q = pack_offsets(in.cu_seqlens_q);
  varlen.seqused_k = pack_offsets(in.seqused_k);
  varlen.total_q = in.query.size(0);
  varlen.lower_right = options.lower_right;
  varlen.mask_by_row = by_row;
  varlen.cache.tree_mask = in.tree_mask.has_value();
  varlen.cache.batch_idx = pack_offsets(in.batch_idx);
  varlen.cache.leftpad = pack_offsets(in.leftpad);
  varlen.cache.float8_products = options.float8_products;
  varlen.cache.key_has_value = options.key_has_value;
  varlen.cache.caches = in.key.size(0);
  varlen.cache.dtype = pack_cache_dtype(in.key.scalar_type());
  if (options.latent_rows) varlen.cache.dtype = CacheDType::kLatent;
  varlen.cache.k_scale = pack_scale(in.key_scale);
  varlen.cache.v_scale = pack_scale(in.value_scale);
  varlen.cache.k_groups = pack_groups(in.key, in.key_group_scale, in.key_group_zero);
  varlen.cache.v_groups = pack_groups(in.value, in.value_group_scale, in.value_group_zero);
  p.sizes.head_dim_v = columns_of(in.value).expect_int();
  if (in.block_table) {
    const int64_t pages = in.block_table->size(1);
    varlen.cache.pages = {pack_offsets(in.block_table), pages, in.key.size(1), in.key.size(0), 0};
    p.sizes.seqlen_k *= pages;
  }
  return packed;
}

}  // namespace flash_attn_ext
