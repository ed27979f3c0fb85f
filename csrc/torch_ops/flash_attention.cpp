// _flash_attention_forward and its backward: torch's interface to FlashAttention, (B, S, H, D) or packed sequences
// (T, H, D) with the offsets where each begins. torch.nn.attention.varlen calls it; torch has no kernel for CPU.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "arguments.h"
#include "overrides.h"

namespace flash_attn_ext::torch_ops {
namespace {

// Where a sequence of a packed tensor begins, and its length.
struct Rows {
  int64_t start, length;
  at::Tensor of(const at::Tensor& packed) const { return packed.narrow(0, start, length); }
};

// Offsets (N + 1), checked: what lies outside of the packed tensor must not be read.
std::vector<Rows> read_offsets(const char* name, const at::Tensor& offsets, int64_t total) {
  TORCH_CHECK_VALUE(offsets.dim() == 1 && offsets.numel() >= 1, name, ": got shape ", offsets.sizes(),
                    "; allowed: (number of sequences + 1)");
  TORCH_CHECK_TYPE(offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong, name,
                   ": got dtype ", offsets.scalar_type(), "; allowed: int32, int64");
  const at::Tensor wide = offsets.to(at::kLong).contiguous();
  const int64_t* at = wide.const_data_ptr<int64_t>();
  std::vector<Rows> rows;
  for (int64_t n = 0; n + 1 < wide.numel(); ++n) {
    TORCH_CHECK_VALUE(0 <= at[n] && at[n] <= at[n + 1] && at[n + 1] <= total, name, ": got ", at[n],
                      " before ", at[n + 1], "; allowed: numbers that do not fall, from 0 to ", total);
    rows.push_back({at[n], at[n + 1] - at[n]});
  }
  return rows;
}

// (S, H, D) as (1, H, S, D).
at::Tensor one_batch(const at::Tensor& rows) { return rows.transpose(0, 1).unsqueeze(0); }
at::Tensor one_sequence(const at::Tensor& batch) { return batch.squeeze(0).transpose(0, 1); }

std::optional<int64_t> window_side(const c10::IValue& argument) {
  const auto side = argument.toOptional<int64_t>();
  return side && *side >= 0 ? side : std::nullopt;
}

// The diagonal lies at the lower right, as in FlashAttention.
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
  options.grad_mask[0] = options.grad_mask[1] = options.grad_mask[2] = true;
  return call<AttentionBackward>(tensors, options);
}

}  // namespace

const char* try_flash_attention(Arguments arguments, Results& results) {
  const at::Tensor &query = arguments[0].toTensor(), &key = arguments[1].toTensor(),
                   &value = arguments[2].toTensor();
  const auto offsets_q = tensor_or_none(arguments[3]), offsets_k = tensor_or_none(arguments[4]);
  if (arguments[7].toDouble() > 0) return "dropout";
  if (arguments[9].toBool()) return "return_debug_mask";
  for (size_t n = 13; n < arguments.size() && n < 16; ++n)
    if (tensor_or_none(arguments[n])) return "seqused_k, alibi_slopes or block_table is given";
  if (offsets_q.has_value() != offsets_k.has_value()) return "offsets for one of query and key alone";
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
  } else {
    const auto rows_q = read_offsets("cum_seq_q", *offsets_q, query.size(0));
    const auto rows_k = read_offsets("cum_seq_k", *offsets_k, key.size(0));
    TORCH_CHECK_VALUE(rows_q.size() == rows_k.size(), "cum_seq_k: got ", rows_k.size(),
                      " sequences; allowed: as in cum_seq_q, ", rows_q.size());
    // One call for each sequence: of many short ones a single call for all would be faster.
    out = at::zeros({query.size(0), query.size(1), value.size(2)}, query.options());
    lse = at::zeros({query.size(1), query.size(0)}, query.options().dtype(accumulate_type(query)));
    for (size_t n = 0; n < rows_q.size(); ++n) {
      auto [part, part_lse] = call<Attention>(
          {one_batch(rows_q[n].of(query)), one_batch(rows_k[n].of(key)), one_batch(rows_k[n].of(value))},
          options);
      rows_q[n].of(out).copy_(one_sequence(part));
      lse.narrow(1, rows_q[n].start, rows_q[n].length).copy_(part_lse.squeeze(0));
    }
  }
  const auto no_random_numbers = query.options().dtype(at::kUInt64);
  results = {out, lse, at::zeros({2}, no_random_numbers), at::empty({0}, no_random_numbers),
             at::empty({0}, query.options())};
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
  const auto rows_q = read_offsets("cum_seq_q", *offsets_q, query.size(0));
  const auto rows_k = read_offsets("cum_seq_k", *offsets_k, key.size(0));
  TORCH_CHECK_VALUE(rows_q.size() == rows_k.size(), "cum_seq_k: got ", rows_k.size(),
                    " sequences; allowed: as in cum_seq_q, ", rows_q.size());
  auto zeros_like = [](const at::Tensor& t) { return at::zeros(t.sizes(), t.options()); };
  const at::Tensor dq = zeros_like(query), dk = zeros_like(key), dv = zeros_like(value);
  for (size_t n = 0; n < rows_q.size(); ++n) {
    auto of_q = [&](const at::Tensor& t) { return one_batch(rows_q[n].of(t)); };
    auto of_k = [&](const at::Tensor& t) { return one_batch(rows_k[n].of(t)); };
    const at::Tensor part_lse = lse.narrow(1, rows_q[n].start, rows_q[n].length).unsqueeze(0);
    const Gradients g = attention_gradients({of_q(query), of_k(key), of_k(value)}, options, of_q(grad_out),
                                            of_q(out), part_lse);
    rows_q[n].of(dq).copy_(one_sequence(g.query));
    rows_k[n].of(dk).copy_(one_sequence(g.key));
    rows_k[n].of(dv).copy_(one_sequence(g.value));
  }
  results = {dq, dk, dv};
  return nullptr;
}

}  // namespace flash_attn_ext::torch_ops
