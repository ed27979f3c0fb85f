#include "checks.h"

#include <cmath>

namespace flash_attn_ext {
namespace {

// Sizes are compared as SymInt: the same text then serves traced calls with dynamic shapes.
using c10::SymInt;

// torch's own name of a dtype, as Python shows it.
std::string name_of(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

void check_device(const char* name, const at::Tensor& t, const at::Tensor& query) {
  TORCH_CHECK_TYPE(t.device() == query.device(), name, ": got device ", t.device(),
                   "; allowed: query's device, ", query.device());
}

void check_4d(const char* name, const at::Tensor& t, const char* shape) {
  TORCH_CHECK_VALUE(t.dim() == 4, name, ": got a tensor of shape ", t.sym_sizes(), "; allowed: 4-D, ", shape);
}

void check_size(const char* name, const at::Tensor& t, int64_t dim, const SymInt& allowed,
                const char* meaning) {
  TORCH_CHECK_VALUE(t.sym_size(dim) == allowed, name, ": got shape ", t.sym_sizes(), ", with size ",
                    t.sym_size(dim), " in dimension ", dim, "; allowed there: ", allowed, " (", meaning, ")");
}

void check_qkv(const AttentionInputs& in) {
  const at::Tensor &q = in.query, &k = in.key, &v = in.value;
  check_device("key", k, q);
  check_device("value", v, q);
  const auto dtype = q.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      "query: got dtype ", name_of(dtype), "; allowed: float32, float64, bfloat16, float16");
  TORCH_CHECK_TYPE(k.scalar_type() == dtype, "key: got dtype ", name_of(k.scalar_type()),
                   "; allowed: query's, ", name_of(dtype));
  TORCH_CHECK_TYPE(v.scalar_type() == dtype, "value: got dtype ", name_of(v.scalar_type()),
                   "; allowed: query's, ", name_of(dtype));
  check_4d("query", q, "(batch, heads, seqlen_q, head_dim)");
  check_4d("key", k, "(batch, heads_kv, seqlen_k, head_dim)");
  check_4d("value", v, "(batch, heads_kv, seqlen_k, head_dim_v)");
  check_size("key", k, 0, q.sym_size(0), "query's batch");
  check_size("value", v, 0, q.sym_size(0), "query's batch");
  check_size("value", v, 1, k.sym_size(1), "key's heads");
  check_size("value", v, 2, k.sym_size(2), "key's sequence length");
  check_size("key", k, 3, q.sym_size(3), "query's head_dim");
  const SymInt heads = q.sym_size(1), heads_kv = k.sym_size(1);
  TORCH_CHECK_VALUE(heads_kv == 0 ? heads == 0 : heads % heads_kv == 0, "key: got ", heads_kv, " heads for ",
                    heads, " query heads; allowed: a divisor of the number of query heads");
  TORCH_CHECK_VALUE(q.sym_size(3) >= 1 && q.sym_size(3) <= kMaxHeadDim, "query: got head_dim ", q.sym_size(3),
                    "; allowed: 1 to ", kMaxHeadDim);
  TORCH_CHECK_VALUE(v.sym_size(3) >= 1 && v.sym_size(3) <= kMaxHeadDim, "value: got head_dim_v ",
                    v.sym_size(3), "; allowed: 1 to ", kMaxHeadDim);
}

void check_mask(const AttentionInputs& in) {
  const at::Tensor &mask = *in.attn_mask, &q = in.query;
  check_device("attn_mask", mask, q);
  const auto dtype = mask.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kBool || dtype == q.scalar_type() || dtype == at::kFloat,
                   "attn_mask: got dtype ", name_of(dtype), "; allowed: bool (true attends), query's (",
                   name_of(q.scalar_type()), ") or float32 (added)");
  check_4d("attn_mask", mask, "broadcastable to (batch, heads, seqlen_q, seqlen_k)");
  const SymInt full[] = {q.sym_size(0), q.sym_size(1), q.sym_size(2), in.key.sym_size(2)};
  static const char* const meaning[] = {"batch", "heads", "seqlen_q", "seqlen_k"};
  for (int64_t dim = 0; dim < 4; ++dim)
    TORCH_CHECK_VALUE(mask.sym_size(dim) == 1 || mask.sym_size(dim) == full[dim], "attn_mask: got shape ",
                      mask.sym_sizes(), ", with size ", mask.sym_size(dim), " in dimension ", dim,
                      "; allowed there: 1 or ", full[dim], " (", meaning[dim], ")");
}

void check_alibi(const AttentionInputs& in) {
  const at::Tensor &slopes = *in.alibi_slopes, &q = in.query;
  check_device("alibi_slopes", slopes, q);
  TORCH_CHECK_TYPE(slopes.scalar_type() == at::kFloat || slopes.scalar_type() == q.scalar_type(),
                   "alibi_slopes: got dtype ", name_of(slopes.scalar_type()),
                   "; allowed: float32 or query's, ", name_of(q.scalar_type()));
  const bool per_head = slopes.dim() == 1 && slopes.sym_size(0) == q.sym_size(1);
  const bool per_batch =
      slopes.dim() == 2 && slopes.sym_size(0) == q.sym_size(0) && slopes.sym_size(1) == q.sym_size(1);
  TORCH_CHECK_VALUE(per_head || per_batch, "alibi_slopes: got shape ", slopes.sym_sizes(),
                    "; allowed: (heads) = [", q.sym_size(1), "] or (batch, heads) = [", q.sym_size(0), ", ",
                    q.sym_size(1), "]");
}

void check_dropout_p(double p) {
  TORCH_CHECK_VALUE(p >= 0.0 && p <= 1.0, "dropout_p: got ", p, "; allowed: 0 to 1");
}

void check_rng_state(const at::Tensor& state) {
  TORCH_CHECK_TYPE(state.scalar_type() == at::kLong, "rng_state: got dtype ", name_of(state.scalar_type()),
                   "; allowed: int64");
  TORCH_CHECK_VALUE(state.dim() == 1 && state.sym_size(0) == 2 && state.is_contiguous(),
                    "rng_state: got shape ", state.sym_sizes(),
                    "; allowed: a contiguous tensor of 2 elements, seed and offset");
}

void check_options(const AttentionInputs& in, const AttentionOptions& o) {
  TORCH_CHECK_VALUE(!o.scale || std::isfinite(*o.scale), "scale: got ", *o.scale,
                    "; allowed: a finite number");
  TORCH_CHECK_VALUE(std::isfinite(o.softcap) && o.softcap >= 0, "softcap: got ", o.softcap,
                    "; allowed: 0 (none) or a positive finite number");
  TORCH_CHECK_VALUE(o.window_left >= -1, "window_left: got ", o.window_left,
                    "; allowed: -1 (no limit) or more");
  TORCH_CHECK_VALUE(o.window_right >= -1, "window_right: got ", o.window_right,
                    "; allowed: -1 (no limit) or more");
  TORCH_CHECK_VALUE(o.num_splits >= 0, "num_splits: got ", o.num_splits,
                    "; allowed: 0 (chosen by the shape) or more");
  TORCH_CHECK_VALUE(!o.unified_max || std::isfinite(*o.unified_max), "unified_max: got ", *o.unified_max,
                    "; allowed: a finite number");
  check_dropout_p(o.dropout_p);
  if (o.dropout_p > 0) {
    TORCH_CHECK_VALUE(in.rng_state.has_value(),
                      "rng_state: got none; allowed with dropout_p > 0: an int64 tensor of seed and offset");
    check_device("rng_state", *in.rng_state, in.query);
    check_rng_state(*in.rng_state);
  }
}

void check_same_form(const char* name, const at::Tensor& t, const at::Tensor& model, const char* model_name) {
  TORCH_CHECK_VALUE(t.sym_sizes() == model.sym_sizes(), name, ": got shape ", t.sym_sizes(),
                    "; allowed: that of ", model_name, ", ", model.sym_sizes());
  TORCH_CHECK_TYPE(t.scalar_type() == model.scalar_type(), name, ": got dtype ", name_of(t.scalar_type()),
                   "; allowed: that of ", model_name, ", ", name_of(model.scalar_type()));
}

}  // namespace

void check_attention(const AttentionInputs& in, const AttentionOptions& options) {
  check_qkv(in);
  if (in.attn_mask) check_mask(in);
  if (in.alibi_slopes) check_alibi(in);
  check_options(in, options);
}

void check_attention_backward(const OptionalTensor& grad_out, const OptionalTensor& grad_lse,
                              const AttentionInputs& in, const at::Tensor& out, const at::Tensor& lse,
                              const AttentionOptions& options, const GradMask& grad_mask) {
  check_attention(in, options);
  const at::Tensor& q = in.query;
  check_device("out", out, q);
  check_4d("out", out, "(batch, heads, seqlen_q, head_dim_v)");
  for (int64_t dim = 0; dim < 3; ++dim) check_size("out", out, dim, q.sym_size(dim), "query's size");
  check_size("out", out, 3, in.value.sym_size(3), "value's head_dim_v");
  TORCH_CHECK_TYPE(out.scalar_type() == q.scalar_type(), "out: got dtype ", name_of(out.scalar_type()),
                   "; allowed: query's, ", name_of(q.scalar_type()));
  check_device("lse", lse, q);
  TORCH_CHECK_VALUE(lse.dim() == 3 && lse.is_contiguous(), "lse: got shape ", lse.sym_sizes(),
                    "; allowed: a contiguous (batch, heads, seqlen_q)");
  for (int64_t dim = 0; dim < 3; ++dim) check_size("lse", lse, dim, q.sym_size(dim), "query's size");
  TORCH_CHECK_TYPE(lse.scalar_type() == accumulate_type(q), "lse: got dtype ", name_of(lse.scalar_type()),
                   "; allowed: float32, and float64 for float64 inputs");
  if (grad_out) {
    check_device("grad_out", *grad_out, q);
    check_same_form("grad_out", *grad_out, out, "out");
  }
  if (grad_lse) {
    check_device("grad_lse", *grad_lse, q);
    check_same_form("grad_lse", *grad_lse, lse, "lse");
  }
  TORCH_CHECK_VALUE(!grad_mask.attn_mask || (in.attn_mask && in.attn_mask->scalar_type() != at::kBool),
                    "grad_mask: got a request for attn_mask's gradient; allowed only with a float attn_mask");
  TORCH_CHECK_VALUE(!grad_mask.alibi_slopes || in.alibi_slopes,
                    "grad_mask: got a request for alibi_slopes' gradient; allowed only with alibi_slopes");
}

void check_dropout_mask(const at::Tensor& rng_state, c10::ArrayRef<c10::SymInt> sizes, double dropout_p) {
  check_rng_state(rng_state);
  check_dropout_p(dropout_p);
  static const char* const names[] = {"batch", "heads", "seqlen_q", "seqlen_k"};
  for (size_t n = 0; n < sizes.size(); ++n)
    TORCH_CHECK_VALUE(sizes[n] >= 0, names[n], ": got ", sizes[n], "; allowed: 0 or more");
}

}  // namespace flash_attn_ext
