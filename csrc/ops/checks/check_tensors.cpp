#include "check_tensors.h"

namespace flash_attn_ext {
namespace {

using c10::SymInt;

const DimName& name_and_owner(Dim dim) { return kDimNames[static_cast<size_t>(dim)]; }

// "(batch, heads, seqlen_q, head_dim)"
std::string names_of(const Shape& shape) {
  std::string text;
  for (int n = 0; n < shape.count; ++n)
    text += (n ? ", " : "(") + std::string(name_and_owner(shape.dims[n]).name);
  return text + ")";
}

bool is_floating(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf;
}

// The dtypes that a rule allows, as a text; empty if it allows `dtype`.
std::string allowed_dtypes(DtypeRule rule, at::ScalarType dtype, at::ScalarType query) {
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
    case DtypeRule::kCache:
      if (dtype == query || dtype == at::kChar || dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2)
        return "";
      return "query's (" + name_of(query) + "), int8, float8_e4m3fn, float8_e5m2";
    case DtypeRule::kCheckedByOperator: return "";
    case DtypeRule::kFloat32: return dtype == at::kFloat ? "" : "float32";
    case DtypeRule::kIndex: return dtype == at::kInt || dtype == at::kLong ? "" : "int32, int64";
  }
  return "";
}

void check_exact(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  check_dimensions(rule, t);
  const bool may_be_1 = rule.shape.kind == Shape::kBroadcast;
  for (int n = 0; n < rule.shape.count; ++n) {
    const Dim dim = rule.shape.dims[n];
    const SymInt size = t.sym_size(n);
    TORCH_CHECK_VALUE((may_be_1 && size == 1) || size == sizes[dim], rule.name, ": got shape ", t.sym_sizes(),
                      ", with size ", size, " in dimension ", n, "; allowed there: ", may_be_1 ? "1 or " : "",
                      sizes[dim], " (", name_and_owner(dim).owner, "'s ", name_and_owner(dim).name, ")");
  }
}

void check_maybe_batched(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  const SymInt &batch = sizes[rule.shape.dims[0]], &heads = sizes[rule.shape.dims[1]];
  const bool alone = t.dim() == 1 && t.sym_size(0) == heads;
  const bool batched = t.dim() == 2 && t.sym_size(0) == batch && t.sym_size(1) == heads;
  TORCH_CHECK_VALUE(alone || batched, rule.name, ": got shape ", t.sym_sizes(), "; allowed: (heads) = [",
                    heads, "] or (batch, heads) = [", batch, ", ", heads, "]");
}

void check_per_sequence(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.sym_size(0) == sizes[Dim::kBatch], rule.name, ": got shape ",
                    t.sym_sizes(), "; allowed: [", sizes[Dim::kBatch], "], one number a sequence");
}

void check_table(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  TORCH_CHECK_VALUE(t.dim() == 2 && t.sym_size(0) == sizes[Dim::kBatch], rule.name, ": got shape ",
                    t.sym_sizes(), "; allowed: (sequences, pages) with ", sizes[Dim::kBatch], " sequences");
}

void check_packed_mask(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  const bool by_row = t.dim() == 3, is_tree = rule.shape.kind == Shape::kTreeMask;
  const char* columns = is_tree ? "max_seqlen_q" : "max_seqlen_k";
  TORCH_CHECK_VALUE(by_row || t.dim() == 4, rule.name, ": got a tensor of shape ", t.sym_sizes(),
                    "; allowed: (heads, total_q, ", columns,
                    "), or 4-D, broadcastable to (sequences, heads, max_seqlen_q, ", columns, ")");
  auto check = [&](int64_t n, const SymInt& allowed, const char* name, bool may_be_1) {
    const SymInt size = t.sym_size(n);
    TORCH_CHECK_VALUE((may_be_1 && size == 1) || size == allowed, rule.name, ": got shape ", t.sym_sizes(),
                      ", with size ", size, " in dimension ", n, "; allowed there: ", may_be_1 ? "1 or " : "",
                      allowed, " (", name, ")");
  };
  if (!by_row) check(0, sizes[Dim::kBatch], "sequences", true);
  check(by_row ? 0 : 1, sizes[Dim::kHeads], "query's heads", true);
  check(by_row ? 1 : 2, sizes[by_row ? Dim::kTotalQ : Dim::kSeqlenQ],
        by_row ? "query's total_q" : "max_seqlen_q", !by_row);
  check(by_row ? 2 : 3, sizes[is_tree ? Dim::kSeqlenQ : Dim::kSeqlenK], columns, true);
}

void check_rotary(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  TORCH_CHECK_VALUE(t.dim() == 2 && 2 * t.sym_size(1) <= sizes[Dim::kHeadDim], rule.name, ": got shape ",
                    t.sym_sizes(), "; allowed: (positions, rotary_dim / 2), rotary_dim at most head_dim, ",
                    sizes[Dim::kHeadDim]);
}

// Checks that an argument comes with the tensor `t`. A bool mask has no gradient and no tangent.
void check_only_with(const std::string& argument, const char* name, bool is_mask, const OptionalTensor& t) {
  TORCH_CHECK_VALUE(t && t->scalar_type() != at::kBool, argument, "; allowed only with ",
                    is_mask ? "a float " : "", name);
}

}  // namespace

std::string name_of(at::ScalarType dtype) { return std::string(c10::getDtypeNames(dtype).first); }

void check_dimensions(const TensorRule& rule, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.dim() == rule.shape.count, rule.name, ": got a tensor of shape ", t.sym_sizes(),
                    "; allowed: ", int{rule.shape.count}, "-D, ",
                    rule.shape.kind == Shape::kBroadcast ? "broadcastable to " : "", names_of(rule.shape));
}

void check_seed_offset(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(
      t.dim() == 1 && (t.sym_size(0) == 2 || t.sym_size(0) == 6) && t.is_contiguous(), name, ": got shape ",
      t.sym_sizes(),
      "; allowed: a contiguous tensor of 2 elements, seed and offset, or of 6, for a part of a larger "
      "call: its first row, column and head, and the larger call's heads");
}

void check_device_and_dtype(const TensorRule& rule, const at::Tensor& t, const at::Tensor& query) {
  TORCH_CHECK_TYPE(t.device() == query.device(), rule.name, ": got device ", t.device(),
                   "; allowed: query's device, ", query.device());
  const std::string allowed = allowed_dtypes(rule.dtype, t.scalar_type(), query.scalar_type());
  TORCH_CHECK_TYPE(allowed.empty(), rule.name, ": got dtype ", name_of(t.scalar_type()),
                   "; allowed: ", allowed);
}

void check_shape(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  switch (rule.shape.kind) {
    case Shape::kExact:
    case Shape::kBroadcast: return check_exact(rule, t, sizes);
    case Shape::kMaybeBatched: return check_maybe_batched(rule, t, sizes);
    case Shape::kSeedOffset: return check_seed_offset(rule.name, t);
    case Shape::kPerSequence: return check_per_sequence(rule, t, sizes);
    case Shape::kPackedMask:
    case Shape::kTreeMask: return check_packed_mask(rule, t, sizes);
    case Shape::kRotary: return check_rotary(rule, t, sizes);
    case Shape::kTable: return check_table(rule, t, sizes);
    case Shape::kCheckedByOperator: return;
  }
}

void check_sizes(const DimSizes& sizes) {
  const SymInt &heads = sizes[Dim::kHeads], &heads_kv = sizes[Dim::kHeadsKv];
  TORCH_CHECK_VALUE(heads_kv == 0 ? heads == 0 : heads % heads_kv == 0, "key: got ", heads_kv, " heads for ",
                    heads, " query heads; allowed: a divisor of the number of query heads");
  for (Dim dim : {Dim::kHeadDim, Dim::kHeadDimV})
    TORCH_CHECK_VALUE(sizes[dim] >= 1 && sizes[dim] <= kMaxHeadDim, name_and_owner(dim).owner, ": got ",
                      name_and_owner(dim).name, " ", sizes[dim], "; allowed: 1 to ", kMaxHeadDim);
}

void check_rng_state(const OptionalTensor& rng_state, double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p == 0.0 || rng_state,
                    "rng_state: got none; allowed with dropout_p > 0: an int64 tensor of seed and offset");
}

void check_grad_mask(const PerGradient<OptionalTensor>& given, const GradFlags& flags) {
  const GradMask wanted(flags);
#define FA_CHECK(name, type, shape, ...)                                        \
  if (wanted.name)                                                              \
    check_only_with("grad_mask: got a request for " #name "'s gradient", #name, \
                    shape.kind == Shape::kBroadcast, given.name);
  FA_DIFFERENTIABLE(FA_CHECK)
#undef FA_CHECK
}

void check_tangents(const PerGradient<OptionalTensor>& given, const InputTangents& tangents) {
#define FA_CHECK(name, type, shape, ...) \
  if (tangents.name)                     \
    check_only_with("tangent_" #name ": got one", #name, shape.kind == Shape::kBroadcast, given.name);
  FA_DIFFERENTIABLE(FA_CHECK)
#undef FA_CHECK
}

}  // namespace flash_attn_ext
