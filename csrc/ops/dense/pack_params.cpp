#include "pack_params.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

namespace flash_attn_ext {
namespace {

enum class Layout { kAny, kContiguousRows, kContiguous, kAccumulator };

Layout layout_of(const TensorRule& rule) {
  switch (rule.shape.kind) {
    case Shape::kMaybeBatched: return Layout::kAccumulator;
    case Shape::kRotary: return Layout::kContiguousRows;
    default: break;
  }
  switch (rule.dtype) {
    case DtypeRule::kIndex:
    case DtypeRule::kAccumulator: return Layout::kContiguous;
    case DtypeRule::kFloating:
    case DtypeRule::kOfQuery:
    case DtypeRule::kCache: return Layout::kContiguousRows;
    default: return Layout::kAny;
  }
}

// A dimension of size 1 is broadcast: stride 0.
int64_t broadcast_stride(const at::Tensor& t, int64_t dim) { return t.size(dim) == 1 ? 0 : t.stride(dim); }

Band pack_band(const Sizes& z, const AttentionOptions& o) {
  auto bounded = [](const std::optional<c10::SymInt>& window) {
    return window ? std::clamp(window->expect_int(), -Band::kUnbounded, Band::kUnbounded) : Band::kUnbounded;
  };
  Band band;
  band.diagonal = pack_diagonal(o) + (o.lower_right ? z.seqlen_k - z.seqlen_q : 0);
  band.left = bounded(o.window_left);
  band.right = o.causal ? std::min<int64_t>(0, bounded(o.window_right)) : bounded(o.window_right);
  band.chunks = {std::min(o.attention_chunk.expect_int(), Chunks::kLargest),
                 std::clamp(o.first_key.expect_int(), -Band::kUnbounded, Band::kUnbounded)};
  return band;
}

// One function for each type of a field in the params. An undefined tensor gives a null field.
void set_field(Tensor4& field, const at::Tensor& t) {
  if (t.defined()) field = {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.stride(1), t.stride(2)};
}
void set_field(MaskParams& field, const OptionalTensor& mask) {
  if (mask)
    field = {mask->const_data_ptr(),     pack_dtype(mask->scalar_type()), broadcast_stride(*mask, 0),
             broadcast_stride(*mask, 1), broadcast_stride(*mask, 2),      broadcast_stride(*mask, 3)};
}
template <class PerHeadParams>
void set_per_head(PerHeadParams& field, const OptionalTensor& t) {
  if (t) field = {t->const_data_ptr(), t->dim() == 2 ? t->stride(0) : 0, t->stride(-1)};
}
void set_field(AlibiParams& field, const OptionalTensor& slopes) { set_per_head(field, slopes); }
void set_field(SinkParams& field, const OptionalTensor& sink) { set_per_head(field, sink); }
void set_field(Tensor4& field, const OptionalTensor& t) {
  if (t) set_field(field, *t);
}
void set_field(MaskGrad& field, const at::Tensor& dmask) {
  if (dmask.defined())
    field = {dmask.mutable_data_ptr(), dmask.size(0), dmask.size(1), dmask.size(2), dmask.size(3)};
}
void set_field(void*& field, const at::Tensor& t) { field = t.defined() ? t.mutable_data_ptr() : nullptr; }

// The fields of each tensor with a gradient.
//     tensor        in AttentionParams and Tangents   of its gradient in BackwardParams
#define FA_PARAM_FIELDS(X)              \
  X(query, q, dq)                       \
  X(key, k, dk)                         \
  X(value, v, dv)                       \
  X(attn_mask, mask, dmask)             \
  X(alibi_slopes, alibi, dalibi_slopes) \
  X(sink, sink, dsink)

constexpr bool every_tensor_has_fields() {
  constexpr std::string_view names[] = {FA_PARAM_FIELDS(FA_QUOTED_NAME)};
  if (std::size(names) != kGradients) return false;
  for (size_t n = 0; n < kGradients; ++n)
    if (names[n] != Gradients::kNames[n]) return false;
  return true;
}
static_assert(every_tensor_has_fields(), "a tensor with a gradient has no line in FA_PARAM_FIELDS");

// One function for each tensor without a gradient.
void set_rng_state(AttentionParams& p, const AttentionTensors& in, const AttentionOptions& o) {
  if (o.dropout_p > 0) p.dropout = pack_dropout(*in.rng_state, o.dropout_p);
}
void set_key_mask(AttentionParams& p, const AttentionTensors& in, const AttentionOptions&) {
  if (!in.key_mask) return;
  const at::Tensor& mask = *in.key_mask;
  if (!in.attn_mask) return set_field(p.mask, mask.unsqueeze(1).unsqueeze(1));
  p.mask.key_data = mask.const_data_ptr();
  p.mask.key_dtype = pack_dtype(mask.scalar_type());
  p.mask.key_stride_b = mask.stride(0);
  p.mask.key_stride_k = mask.stride(1);
}

Tangents pack_tangents(const InputTangents& in) {
  Tangents tangents;
#define FA_SET_TANGENT(name, field, gradient) set_field(tangents.field, in.name);
  FA_PARAM_FIELDS(FA_SET_TANGENT)
#undef FA_SET_TANGENT
  return tangents;
}

}  // namespace

bool is_in_kernel_layout(const TensorRule& rule, const at::Tensor& t, at::ScalarType accumulator) {
  switch (layout_of(rule)) {
    case Layout::kAny: return true;
    case Layout::kContiguousRows: return t.size(-1) <= 1 || t.stride(-1) == 1;
    case Layout::kContiguous: return t.is_contiguous();
    case Layout::kAccumulator: return t.scalar_type() == accumulator;
  }
  return true;
}

at::Tensor to_kernel_layout(const TensorRule& rule, const at::Tensor& t, at::ScalarType accumulator) {
  return layout_of(rule) == Layout::kAccumulator ? t.to(accumulator) : t.contiguous();
}

at::Tensor zeros_like_one_row(const at::Tensor& t) {
  std::vector<int64_t> sizes(t.dim(), 1);
  sizes.back() = t.size(-1);
  return at::zeros(sizes, t.options()).expand_as(t);
}

DType pack_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return DType::kFloat32;
    case at::kDouble: return DType::kFloat64;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    case at::kBool: return DType::kBool;
    default: TORCH_INTERNAL_ASSERT(false, "unchecked dtype ", dtype);
  }
}

int64_t pack_diagonal(const AttentionOptions& o) {
  return std::clamp(o.diagonal.expect_int(), -Band::kUnbounded, Band::kUnbounded);
}

DropoutParams pack_dropout(const at::Tensor& rng_state, double dropout_p) {
  DropoutParams dropout;
  dropout.rng_state = rng_state.const_data_ptr<int64_t>();
  dropout.place = rng_state.size(0) > 2 ? dropout.rng_state + 2 : nullptr;
  dropout.threshold = static_cast<uint64_t>(std::llround(std::ldexp(dropout_p, 32)));
  dropout.keep_scale = dropout_p < 1 ? 1.0 / (1.0 - dropout_p) : 0.0;
  return dropout;
}

AttentionParams pack_attention(const AttentionTensors& in, const at::Tensor& out, const at::Tensor& lse,
                               const AttentionOptions& o) {
  AttentionParams p;
  p.dtype = pack_dtype(in.query.scalar_type());
  p.sizes = {in.query.size(0), in.query.size(1), in.key.size(1),  in.query.size(2),
             in.key.size(2),   in.query.size(3), in.value.size(3)};
#define FA_FILL(name, field, gradient) set_field(p.field, in.name);
  FA_PARAM_FIELDS(FA_FILL)
#undef FA_FILL
#define FA_FILL(name, ...) set_##name(p, in, o);
  FA_WITHOUT_GRADIENT(FA_FILL)
#undef FA_FILL
  set_field(p.out, out);
  p.lse = const_cast<void*>(lse.const_data_ptr());
  p.scale = o.scale.value_or(1.0 / std::sqrt(static_cast<double>(p.sizes.head_dim)));
  p.softcap = o.softcap;
  p.band = pack_band(p.sizes, o);
  p.decode = {o.num_splits.expect_int(), o.unified_max.has_value(), o.unified_max.value_or(0.0)};
  return p;
}

void pack_backward(BackwardParams& p, const AttentionBackwardTensors& in, const AttentionBackwardOptions& o,
                   const Gradients& result, const PerHead<at::Tensor>& per_head) {
  static_cast<AttentionParams&>(p) = pack_attention(in.forward(), in.out, in.lse, o.forward());
  Gradients written = result;
#define FA_PART(name, ...) written.name = per_head.name;
  FA_PER_HEAD(FA_PART)
#undef FA_PART
#define FA_FILL(name, field, gradient) set_field(p.gradient, written.name);
  FA_PARAM_FIELDS(FA_FILL)
#undef FA_FILL
  set_field(p.dout, in.grad_out);
  p.dlse = in.grad_lse ? in.grad_lse->const_data_ptr() : nullptr;
  p.deterministic = o.deterministic;
}

void pack_jvp(JvpParams& p, const AttentionJvpTensors& in, const AttentionOptions& o,
              const AttentionJvpResult& result) {
  static_cast<AttentionParams&>(p) = pack_attention(in.forward(), result.out, result.lse, o);
  p.tangents = pack_tangents(in.tangents());
  set_field(p.t_out, result.tangent_out);
  p.t_lse = result.tangent_lse.mutable_data_ptr();
}

void pack_double_backward(DoubleBackwardParams& p, const AttentionDoubleBackwardTensors& in,
                          const AttentionBackwardOptions& o, const Gradients& result,
                          const PerHead<at::Tensor>& per_head) {
  pack_backward(p, in.backward(), o, result, per_head);
  p.tangents = pack_tangents(in.tangents());
  set_field(p.t_out, in.tangent_out);
  p.t_lse = in.tangent_lse.const_data_ptr();
}

PerHead<at::Tensor> empty_per_head(const Gradients& result, const at::Tensor& lse, int64_t batch,
                                   int64_t heads) {
  PerHead<at::Tensor> parts;
#define FA_ALLOCATE(name, ...) \
  if (result.name.defined()) parts.name = at::empty({batch, heads}, lse.options());
  FA_PER_HEAD(FA_ALLOCATE)
#undef FA_ALLOCATE
  return parts;
}

void store_per_head_gradients(const PerHead<at::Tensor>& per_head, const Gradients& result) {
  auto store = [](const at::Tensor& parts, const at::Tensor& gradient) {
    if (gradient.defined()) gradient.copy_(gradient.dim() == 1 ? parts.sum(0) : parts);
  };
#define FA_STORE(name, ...) store(per_head.name, result.name);
  FA_PER_HEAD(FA_STORE)
#undef FA_STORE
}

Packed<Attention> Attention::pack(const Tensors& given, const Options& options, const Result& result) {
  Packed<Attention> packed{to_kernel_layout(given), {}, {}};
  packed.params = pack_attention(packed.tensors, result.out, result.lse, options);
  return packed;
}

Packed<AttentionBackward> AttentionBackward::pack(const Tensors& given, const Options& options,
                                                  const Result& result) {
  Packed<AttentionBackward> packed{to_kernel_layout(given), {}, {}};
  fill_grad_out(packed.tensors);
  packed.per_head = empty_per_head(result, given.lse, given.query.size(0), given.query.size(1));
  pack_backward(packed.params, packed.tensors, options, result, packed.per_head);
  return packed;
}

Packed<AttentionJvp> AttentionJvp::pack(const Tensors& given, const Options& options, const Result& result) {
  Packed<AttentionJvp> packed{to_kernel_layout(given), {}, {}};
  pack_jvp(packed.params, packed.tensors, options, result);
  return packed;
}

Packed<AttentionDoubleBackward> AttentionDoubleBackward::pack(const Tensors& given, const Options& options,
                                                              const Result& result) {
  Packed<AttentionDoubleBackward> packed{to_kernel_layout(given), {}, {}};
  fill_grad_out(packed.tensors);
  fill_tangents(packed.tensors);
  packed.per_head = empty_per_head(result, given.lse, given.query.size(0), given.query.size(1));
  pack_double_backward(packed.params, packed.tensors, options, result, packed.per_head);
  return packed;
}

}  // namespace flash_attn_ext
