#include "checks.h"

#include <cmath>

namespace flash_attn_ext {
namespace {

// Sizes are compared as SymInt: the same text then serves traced calls with dynamic shapes.
using c10::SymInt;

struct DimSizes {
  SymInt sizes[static_cast<size_t>(Dim::kCount)];
  const SymInt& operator[](Dim dim) const { return sizes[static_cast<size_t>(dim)]; }
};

const DimName& name_of(Dim dim) { return kDimNames[static_cast<size_t>(dim)]; }

// torch's own name of a dtype, as Python shows it.
std::string name_of(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

// "(batch, heads, seqlen_q, head_dim)"
std::string names_of(const Shape& shape) {
  std::string text;
  for (int n = 0; n < shape.count; ++n) text += (n ? ", " : "(") + std::string(name_of(shape.dims[n]).name);
  return text + ")";
}

bool is_floating(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// What a dtype rule allows, in words; empty if it allows `dtype`.
std::string refused_dtype(DtypeRule rule, at::ScalarType dtype, at::ScalarType query) {
  switch (rule) {
    case DtypeRule::kFloating: return is_floating(dtype) ? "" : "float32, float64, bfloat16, float16";
    case DtypeRule::kOfQuery: return dtype == query ? "" : "query's, " + name_of(query);
    case DtypeRule::kMask:
      if (dtype == at::kBool || dtype == query || dtype == at::kFloat) return "";
      return "bool (true attends), query's (" + name_of(query) + ") or float32 (added)";
    case DtypeRule::kAdded:
      return dtype == query || dtype == at::kFloat ? "" : "float32 or query's, " + name_of(query);
    case DtypeRule::kAccumulator:
      return dtype == (query == at::kDouble ? at::kDouble : at::kFloat)
                 ? ""
                 : "float32, and float64 for float64 inputs";
    case DtypeRule::kInt64: return dtype == at::kLong ? "" : "int64";
  }
  return "";
}

void check_dimensions(const TensorRule& rule, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == rule.shape.count, rule.name, ": got a tensor of shape ", t.sym_sizes(),
                    "; allowed: ", int{rule.shape.count}, "-D, ",
                    rule.shape.kind == Shape::kBroadcast ? "broadcastable to " : "", names_of(rule.shape));
}

void check_exact(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  check_dimensions(rule, t);
  const bool may_be_1 = rule.shape.kind == Shape::kBroadcast;
  for (int n = 0; n < rule.shape.count; ++n) {
    const Dim dim = rule.shape.dims[n];
    const SymInt size = t.sym_size(n);
    TORCH_CHECK_VALUE((may_be_1 && size == 1) || size == sizes[dim], rule.name, ": got shape ", t.sym_sizes(),
                      ", with size ", size, " in dimension ", n, "; allowed there: ", may_be_1 ? "1 or " : "",
                      sizes[dim], " (", name_of(dim).owner, "'s ", name_of(dim).name, ")");
  }
}

void check_maybe_batched(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  const SymInt &batch = sizes[rule.shape.dims[0]], &heads = sizes[rule.shape.dims[1]];
  const bool alone = t.dim() == 1 && t.sym_size(0) == heads;
  const bool batched = t.dim() == 2 && t.sym_size(0) == batch && t.sym_size(1) == heads;
  TORCH_CHECK_VALUE(alone || batched, rule.name, ": got shape ", t.sym_sizes(), "; allowed: (heads) = [",
                    heads, "] or (batch, heads) = [", batch, ", ", heads, "]");
}

void check_seed_offset(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.sym_size(0) == 2 && t.is_contiguous(), name, ": got shape ",
                    t.sym_sizes(), "; allowed: a contiguous tensor of 2 elements, seed and offset");
}

void check_dtype(const TensorRule& rule, const at::Tensor& t, at::ScalarType query) {
  const std::string allowed = refused_dtype(rule.dtype, t.scalar_type(), query);
  TORCH_CHECK_TYPE(allowed.empty(), rule.name, ": got dtype ", name_of(t.scalar_type()),
                   "; allowed: ", allowed);
}

// The sizes that query, key and value give.
template <class Tensors>
DimSizes sizes_of(const Tensors& in) {
  for_each_tensor(in, [&](const TensorRule& rule, const auto& t) {
    if constexpr (std::is_same_v<decltype(t), const at::Tensor&>) check_dimensions(rule, t);
  });
  const at::Tensor &q = in.query, &k = in.key, &v = in.value;
  return {{q.sym_size(0), q.sym_size(1), k.sym_size(1), q.sym_size(2), k.sym_size(2), q.sym_size(3),
           v.sym_size(3)}};
}

template <class Tensors>
DimSizes check_tensors(const Tensors& tensors) {
  const auto query = tensors.query.scalar_type();
  for_each_tensor(tensors, [&](const TensorRule& rule, const auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (!t) return;
    TORCH_CHECK_TYPE(t->device() == tensors.query.device(), rule.name, ": got device ", t->device(),
                     "; allowed: query's device, ", tensors.query.device());
    check_dtype(rule, *t, query);
  });
  const DimSizes sizes = sizes_of(tensors);
  for_each_tensor(tensors, [&](const TensorRule& rule, const auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (!t) return;
    switch (rule.shape.kind) {
      case Shape::kExact:
      case Shape::kBroadcast: return check_exact(rule, *t, sizes);
      case Shape::kMaybeBatched: return check_maybe_batched(rule, *t, sizes);
      case Shape::kSeedOffset: return check_seed_offset(rule.name, *t);
    }
  });
  return sizes;
}

// What the sizes have to be among themselves.
void check_sizes(const DimSizes& sizes) {
  const SymInt &heads = sizes[Dim::kHeads], &heads_kv = sizes[Dim::kHeadsKv];
  TORCH_CHECK_VALUE(heads_kv == 0 ? heads == 0 : heads % heads_kv == 0, "key: got ", heads_kv, " heads for ",
                    heads, " query heads; allowed: a divisor of the number of query heads");
  for (Dim dim : {Dim::kHeadDim, Dim::kHeadDimV})
    TORCH_CHECK_VALUE(sizes[dim] >= 1 && sizes[dim] <= kMaxHeadDim, name_of(dim).owner, ": got ",
                      name_of(dim).name, " ", sizes[dim], "; allowed: 1 to ", kMaxHeadDim);
}

double shown(double v) { return v; }
double shown(const std::optional<double>& v) { return v.value_or(0.0); }
int64_t shown(int64_t v) { return v; }
int64_t shown(const std::optional<int64_t>& v) { return v.value_or(0); }
bool shown(bool v) { return v; }

void check_options(const AttentionTensors& in, const AttentionOptions& options) {
#define FA_CHECK_OPTION(name, type, default_value, check, allowed)                         \
  {                                                                                        \
    [[maybe_unused]] const auto& v = options.name;                                         \
    TORCH_CHECK_VALUE(check, #name ": got ", shown(options.name), "; allowed: ", allowed); \
  }
  FA_ATTENTION_OPTIONS(FA_CHECK_OPTION)
#undef FA_CHECK_OPTION
  TORCH_CHECK_VALUE(options.dropout_p == 0.0 || in.rng_state,
                    "rng_state: got none; allowed with dropout_p > 0: an int64 tensor of seed and offset");
}

}  // namespace

void check_attention(const AttentionTensors& tensors, const AttentionOptions& options) {
  check_sizes(check_tensors(tensors));
  check_options(tensors, options);
}

void check_attention_backward(const AttentionBackwardTensors& tensors,
                              const AttentionBackwardOptions& options) {
  check_sizes(check_tensors(tensors));
  check_options(tensors.forward(), options.forward());
  const GradMask wanted(options.grad_mask);
  TORCH_CHECK_VALUE(!wanted.attn_mask || (tensors.attn_mask && tensors.attn_mask->scalar_type() != at::kBool),
                    "grad_mask: got a request for attn_mask's gradient; allowed only with a float attn_mask");
  TORCH_CHECK_VALUE(!wanted.alibi_slopes || tensors.alibi_slopes,
                    "grad_mask: got a request for alibi_slopes' gradient; allowed only with alibi_slopes");
}

void check_dropout_mask(const at::Tensor& rng_state, c10::ArrayRef<c10::SymInt> sizes, double dropout_p) {
  TORCH_CHECK_TYPE(rng_state.scalar_type() == at::kLong, "rng_state: got dtype ",
                   name_of(rng_state.scalar_type()), "; allowed: int64");
  check_seed_offset("rng_state", rng_state);
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p: got ", dropout_p, "; allowed: 0 to 1");
  const Dim dims[] = {Dim::kBatch, Dim::kHeads, Dim::kSeqlenQ, Dim::kSeqlenK};
  for (size_t n = 0; n < sizes.size(); ++n)
    TORCH_CHECK_VALUE(sizes[n] >= 0, name_of(dims[n]).name, ": got ", sizes[n], "; allowed: 0 or more");
}

void check_storage(const char* name, const at::Tensor& t) {
  if (t.numel() == 0) return;
  int64_t last = t.storage_offset();
  for (int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
  const size_t needed = static_cast<size_t>(last + 1) * t.element_size();
  TORCH_CHECK_VALUE(t.storage().nbytes() >= needed, name, ": got a tensor whose storage has ",
                    t.storage().nbytes(), " bytes of the ", needed,
                    " that it needs; allowed: a storage that was not freed");
}

}  // namespace flash_attn_ext
