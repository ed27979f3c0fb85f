// _flash_attention_forward and its backward: torch's interface to FlashAttention, for (B, S, H, D) or for packed
// sequences (T, H, D) with their offsets. torch.nn.attention.varlen calls it; torch has no kernel for CPU.
// On CUDA scaled_dot_product_attention calls _scaled_dot_product_flash_attention, the same for (B, H, S, D).
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "../ops/cache/kvcache.h"
#include "arguments.h"
#include "overrides.h"

namespace flash_attn_ext::torch_overrides {
namespace {

std::optional<int64_t> window_side(const c10::IValue& argument) {
  const auto side = argument.toOptional<int64_t>();
  return side && *side >= 0 ? side : std::nullopt;
}

// The diagonal ends at the lower right, as in FlashAttention.
AttentionOptions make_options(bool is_causal, const c10::IValue& scale, const c10::IValue& left,
                              const c10::IValue& right) {
  AttentionOptions options;
  options.causal = is_causal;
  options.lower_right = true;
  options.scale = scale.toOptional<double>();
  options.window_left = window_side(left);
  options.window_right = window_side(right);
  return options;
}

const char* why_not_tensors_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               bool packed) {
  if (query.dim() != (packed ? 3 : 4) || key.dim() != query.dim() || value.dim() != query.dim())
    return "the tensors have neither 3 dimensions with offsets nor 4 without";
  auto heads_first = [](const at::Tensor& t) { return t.transpose(-3, -2); };
  return why_not_tensors(heads_first(query), heads_first(key), heads_first(value));
}

Gradients attention_gradients(const AttentionTensors& forward, const AttentionOptions& forward_options,
                              const at::Tensor& grad_out, const at::Tensor& out, const at::Tensor& lse) {
  AttentionBackwardTensors tensors;
  tensors.set_forward(forward);
  tensors.grad_out = grad_out;
  tensors.out = out;
  tensors.lse = lse.contiguous();
  AttentionBackwardOptions options;
  options.set_forward(forward_options);
  options.grad_mask = flags_of_query_key_value();
  return call<AttentionBackward>(tensors, options);
}

}  // namespace

const char* try_flash_attention(Arguments arguments, Results& results) {
  const at::Tensor &query = arguments[0].toTensor(), &key = arguments[1].toTensor(),
                   &value = arguments[2].toTensor();
  const auto offsets_q = tensor_or_none(arguments[3]), offsets_k = tensor_or_none(arguments[4]);
  if (arguments[7].toDouble() > 0) return "dropout";
  if (arguments[9].toBool()) return "return_debug_mask";
  const auto optional = [&](size_t n) {
    return n < arguments.size() ? tensor_or_none(arguments[n]) : OptionalTensor();
  };
  const OptionalTensor seqused_k = optional(13), alibi_slopes = optional(14), block_table = optional(15);
  if (!offsets_q && (seqused_k || alibi_slopes || block_table))
    return "seqused_k, alibi_slopes or block_table is given without offsets";
  const bool keys_in_pages = block_table && seqused_k;  // seqused_k has their lengths
  if (offsets_q.has_value() != offsets_k.has_value() && !keys_in_pages)
    return "offsets for one of query and key alone";
  if (!block_table)
    if (const char* reason = why_not_tensors_of(query, key, value, offsets_q.has_value())) return reason;
  const AttentionOptions options =
      make_options(arguments[8].toBool(), arguments[10], arguments[11], arguments[12]);
  if (options.scale && !std::isfinite(*options.scale)) return "scale is not finite";

  at::Tensor out, lse;
  if (!offsets_q) {
    auto [out_heads_first, dense_lse] =
        call<Attention>({query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)}, options);
    out = out_heads_first.transpose(1, 2);
    lse = dense_lse;
  } else if (block_table) {
    CacheTensors tensors{query, key, value};
    tensors.alibi_slopes = alibi_slopes;
    tensors.cu_seqlens_q = *offsets_q;
    tensors.seqused_k = seqused_k ? *seqused_k : offsets_k->diff();
    tensors.block_table = block_table;
    CacheOptions cache;
    cache.set_attention(options);
    cache.max_seqlen_q = arguments[5].toSymInt();
    const AttentionResult result = call<AttentionCache>(tensors, cache);
    out = result.out;
    lse = result.lse;
  } else {
    VarlenTensors tensors{query, key, value};
    tensors.alibi_slopes = alibi_slopes;
    tensors.cu_seqlens_q = *offsets_q;
    tensors.cu_seqlens_k = *offsets_k;
    tensors.seqused_k = seqused_k;
    VarlenOptions varlen;
    varlen.set_attention(options);
    varlen.max_seqlen_q = arguments[5].toSymInt();
    varlen.max_seqlen_k = arguments[6].toSymInt();
    const AttentionResult result = call<AttentionVarlen>(tensors, varlen);
    out = result.out;
    lse = result.lse;
  }
  const auto no_random_numbers = query.options().dtype(at::kUInt64);
  results = {out, lse, at::zeros({2}, no_random_numbers), at::empty({0}, no_random_numbers),
             at::empty({0}, query.options())};
  return nullptr;
}

// varlen_attn_out: writes the same result to its first argument and returns lse.
const char* try_flash_attention_inplace(Arguments arguments, Results& results) {
  if (const char* reason = try_flash_attention(arguments.slice(1), results)) return reason;
  arguments[0].toTensor().copy_(results[0].toTensor());
  results = {results[1]};
  return nullptr;
}

const char* try_flash_attention_backward(Arguments arguments, Results& results) {
  const at::Tensor &grad_out = arguments[0].toTensor(), &query = arguments[1].toTensor(),
                   &key = arguments[2].toTensor(), &value = arguments[3].toTensor(),
                   &out = arguments[4].toTensor(), &lse = arguments[5].toTensor();
  const auto offsets_q = tensor_or_none(arguments[6]), offsets_k = tensor_or_none(arguments[7]);
  if (arguments[10].toDouble() > 0) return "dropout";
  if (offsets_q.has_value() != offsets_k.has_value()) return "offsets for one of query and key alone";
  if (const char* reason = why_not_tensors_of(query, key, value, offsets_q.has_value())) return reason;
  const AttentionOptions options =
      make_options(arguments[11].toBool(), arguments[14], arguments[15], arguments[16]);

  if (!offsets_q) {
    auto heads_first = [](const at::Tensor& t) { return t.transpose(1, 2); };
    const Gradients g = attention_gradients({heads_first(query), heads_first(key), heads_first(value)},
                                            options, heads_first(grad_out), heads_first(out), lse);
    results = {heads_first(g.query), heads_first(g.key), heads_first(g.value)};
    return nullptr;
  }
  VarlenTensors forward{query, key, value};
  forward.cu_seqlens_q = *offsets_q;
  forward.cu_seqlens_k = *offsets_k;
  VarlenOptions varlen;
  varlen.set_attention(options);
  varlen.max_seqlen_q = arguments[8].toSymInt();
  varlen.max_seqlen_k = arguments[9].toSymInt();
  VarlenBackwardTensors tensors;
  tensors.set_forward(forward);
  tensors.grad_out = grad_out;
  tensors.out = out;
  tensors.lse = lse;
  VarlenBackwardOptions backward;
  backward.set_forward(varlen);
  backward.grad_mask = flags_of_query_key_value();
  const Gradients g = call<AttentionVarlenBackward>(tensors, backward);
  results = {g.query, g.key, g.value};
  return nullptr;
}

namespace {

const char* why_not_sdpa_flash(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                               double dropout_p, const std::optional<double>& scale) {
  if (const char* reason = why_not_tensors(query, key, value)) return reason;
  if (query.dim() != 4) return "the tensors do not have 4 dimensions";
  if (dropout_p > 0) return "dropout";
  if (scale && !std::isfinite(*scale)) return "scale is not finite";
  return nullptr;
}

AttentionOptions make_sdpa_options(bool is_causal, const std::optional<double>& scale) {
  AttentionOptions options;
  options.causal = is_causal;
  options.scale = scale;
  options.deterministic = at::globalContext().deterministicAlgorithms();
  return options;
}

}  // namespace

const char* try_sdpa_flash(Arguments arguments, Results& results) {
  const at::Tensor &query = arguments[0].toTensor(), &key = arguments[1].toTensor(),
                   &value = arguments[2].toTensor();
  const auto scale = arguments[6].toOptional<double>();
  if (arguments[5].toBool()) return "return_debug_mask";
  if (const char* reason = why_not_sdpa_flash(query, key, value, arguments[3].toDouble(), scale))
    return reason;
  const AttentionResult result =
      call<Attention>({query, key, value}, make_sdpa_options(arguments[4].toBool(), scale));
  const auto no_random_numbers = query.options().dtype(at::kUInt64);
  results = {in_memory_order_of(result.out, query),
             result.lse,
             at::Tensor(),
             at::Tensor(),
             query.sym_size(2),
             key.sym_size(2),
             at::zeros({2}, no_random_numbers),
             at::empty({0}, no_random_numbers),
             at::empty({0}, query.options())};
  return nullptr;
}

const char* try_sdpa_flash_backward(Arguments arguments, Results& results) {
  const at::Tensor &grad_out = arguments[0].toTensor(), &query = arguments[1].toTensor(),
                   &key = arguments[2].toTensor(), &value = arguments[3].toTensor(),
                   &out = arguments[4].toTensor(), &lse = arguments[5].toTensor();
  const auto scale = arguments[14].toOptional<double>();
  if (const char* reason = why_not_sdpa_flash(query, key, value, arguments[10].toDouble(), scale))
    return reason;
  const Gradients g = attention_gradients(
      {query, key, value}, make_sdpa_options(arguments[11].toBool(), scale), grad_out, out, lse);
  results = {in_memory_order_of(g.query, query), in_memory_order_of(g.key, key),
             in_memory_order_of(g.value, value)};
  return nullptr;
}

}  // namespace flash_attn_ext::torch_overrides
