#include "../own_fields.h"
#include "flex.h"
#include "simt.h"

namespace flash_attn_ext::cuda::simt {
namespace {

// Names every field of a call. After a new field, this file does not compile until the field is named here. If the
// kernels of this tier do not read the field, a function why_not must return a reason.
[[maybe_unused]] void name_every_field(const AttentionParams& p, const Tangents& t) {
  [[maybe_unused]] const auto& [dtype, sizes, q, k, v, out, lse, scale, softcap, band, mask, alibi, sink,
                                dropout, decode, varlen, functions] = p;
  [[maybe_unused]] const auto& [diagonal, left, right] = p.band.without_chunks();
  [[maybe_unused]] const auto& [chunk, first_key] = p.band.chunks;
  static_assert(sizeof(Band) == sizeof(DiagonalBand) + sizeof(Chunks), "names every field of Band");
  [[maybe_unused]] const auto& [mask_data, mask_dtype, mask_b, mask_h, mask_q, mask_k, key_data, key_dtype,
                                key_b, key_k] = p.mask;
  [[maybe_unused]] const auto& [slopes, slopes_b, slopes_h] = p.alibi;
  [[maybe_unused]] const auto& [sink_data, sink_b, sink_h] = p.sink;
  [[maybe_unused]] const auto& [rng_state, place, threshold, keep_scale, place_stride] = p.dropout;
  [[maybe_unused]] const auto& [num_splits, has_unified_max, unified_max] = p.decode;
  [[maybe_unused]] const auto& [cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, total_q, total_k,
                                lower_right, mask_by_row, first_q, first_k, caches] = p.varlen;
  [[maybe_unused]] const auto& [batch_idx, leftpad, cache_count, cache_dtype, k_scale, v_scale, k_groups,
                                v_groups, pages, cache, tree_mask, first_masked, float8_products,
                                key_has_value] = p.varlen.cache;
  [[maybe_unused]] const auto& [page_table, page_count, page_size, num_pages, sequence] =
      p.varlen.cache.pages;
  [[maybe_unused]] const auto& [t_q, t_k, t_v, t_mask, t_alibi, t_sink] = t;
  using B = BackwardParams;
  static_assert(
      are_all_fields<B, AttentionParams>(&B::dout, &B::dweights, &B::dlse, &B::dq, &B::dk, &B::dv, &B::dmask,
                                         &B::dalibi_slopes, &B::dsink, &B::deterministic),
      "names every field of BackwardParams");
}

[[maybe_unused]] void name_every_field(const IndexerParams& p) {
  [[maybe_unused]] const auto& [dtype, batch, heads, seqlen_q, seqlen_k, head_dim, q, k, weights, scale, band,
                                key_mask, lengths, lower_right, block_table, blocks, page_size] = p;
}

}  // namespace

const char* why_not_forward(const AttentionParams& p) {
  if (const char* reason = why_not_functions(p)) return reason;
  if (p.varlen.cache.key_has_value) return "simt: qv with separate caches is for the CPU only so far";
  if (p.varlen.cache.dtype == CacheDType::kLatent)
    return "simt: FlashMLA's caches are for the CPU only so far";
  return p.decode.has_unified_max ? "simt: unified_max is for the CPU only so far" : nullptr;
}

const char* why_not_indexer(const IndexerParams& p) {
  return p.block_table ? "simt: the indexer's scores and loss do not read pages" : nullptr;
}

}  // namespace flash_attn_ext::cuda::simt
