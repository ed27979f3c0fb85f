#include "checks.h"

#include "kvcache.h"

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
    case DtypeRule::kCache:
      if (dtype == query || dtype == at::kChar || dtype == at::kFloat8_e4m3fn || dtype == at::kFloat8_e5m2)
        return "";
      return "query's (" + name_of(query) + "), int8, float8_e4m3fn, float8_e5m2";
    case DtypeRule::kFloat32: return dtype == at::kFloat ? "" : "float32";
    case DtypeRule::kIndex: return dtype == at::kInt || dtype == at::kLong ? "" : "int32, int64";
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

void check_per_sequence(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  TORCH_CHECK_VALUE(t.dim() == 1 && t.sym_size(0) == sizes[Dim::kBatch], rule.name, ": got shape ",
                    t.sym_sizes(), "; allowed: [", sizes[Dim::kBatch], "], one number a sequence");
}

void check_table(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  TORCH_CHECK_VALUE(t.dim() == 2 && t.sym_size(0) == sizes[Dim::kBatch], rule.name, ": got shape ",
                    t.sym_sizes(), "; allowed: (sequences, pages) with ", sizes[Dim::kBatch], " sequences");
}

void check_packed_mask(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes) {
  const bool by_row = t.dim() == 3;
  TORCH_CHECK_VALUE(by_row || t.dim() == 4, rule.name, ": got a tensor of shape ", t.sym_sizes(),
                    "; allowed: (heads, total_q, max_seqlen_k), or 4-D, broadcastable to (sequences, heads, "
                    "max_seqlen_q, max_seqlen_k)");
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
  check(by_row ? 2 : 3, sizes[Dim::kSeqlenK], "max_seqlen_k", true);
}

// The sizes that the tensors which have to be given say, each the first one that has it.
template <class Tensors>
DimSizes sizes_of(const Tensors& in) {
  DimSizes sizes;
  bool known[static_cast<size_t>(Dim::kCount)] = {};
  for_each_tensor(in, [&](const TensorRule& rule, const auto& t) {
    if constexpr (std::is_same_v<decltype(t), const at::Tensor&>) {
      if (rule.shape.kind != Shape::kExact) return;
      check_dimensions(rule, t);
      for (int n = 0; n < rule.shape.count; ++n) {
        const auto dim = static_cast<size_t>(rule.shape.dims[n]);
        if (!known[dim]) sizes.sizes[dim] = t.sym_size(n);
        known[dim] = true;
      }
    }
  });
  return sizes;
}

// Those of packed sequences that no tensor says.
template <class Tensors, class Options>
DimSizes sizes_of(const Tensors& in, const Options& options) {
  DimSizes sizes = sizes_of(in);
  const SymInt offsets = sizes[Dim::kOffsets];
  TORCH_CHECK_VALUE(offsets >= 1, "cu_seqlens_q: got shape ", in.cu_seqlens_q.sym_sizes(),
                    "; allowed: [sequences + 1]");
  sizes.sizes[static_cast<size_t>(Dim::kBatch)] = offsets - 1;
  sizes.sizes[static_cast<size_t>(Dim::kSeqlenQ)] = options.max_seqlen_q.value_or(sizes[Dim::kTotalQ]);
  if constexpr (!std::is_same_v<Tensors, CacheTensors>)
    sizes.sizes[static_cast<size_t>(Dim::kSeqlenK)] = options.max_seqlen_k.value_or(sizes[Dim::kTotalK]);
  return sizes;
}

template <class Tensors, class... Options>
DimSizes check_tensors(const Tensors& tensors, const Options&... options) {
  const auto query = tensors.query.scalar_type();
  for_each_tensor(tensors, [&](const TensorRule& rule, const auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (!t) return;
    TORCH_CHECK_TYPE(t->device() == tensors.query.device(), rule.name, ": got device ", t->device(),
                     "; allowed: query's device, ", tensors.query.device());
    check_dtype(rule, *t, query);
  });
  const DimSizes sizes = sizes_of(tensors, options...);
  for_each_tensor(tensors, [&](const TensorRule& rule, const auto& optional) {
    const at::Tensor* t = tensor_or_null(optional);
    if (!t) return;
    switch (rule.shape.kind) {
      case Shape::kExact:
      case Shape::kBroadcast: return check_exact(rule, *t, sizes);
      case Shape::kMaybeBatched: return check_maybe_batched(rule, *t, sizes);
      case Shape::kSeedOffset: return check_seed_offset(rule.name, *t);
      case Shape::kPerSequence: return check_per_sequence(rule, *t, sizes);
      case Shape::kPackedMask: return check_packed_mask(rule, *t, sizes);
      case Shape::kTable: return check_table(rule, *t, sizes);
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
SymInt shown(const std::optional<SymInt>& v) { return v.value_or(0); }

#define FA_CHECK_OPTION(name, type, default_value, check, allowed)                         \
  {                                                                                        \
    [[maybe_unused]] const auto& v = options.name;                                         \
    TORCH_CHECK_VALUE(check, #name ": got ", shown(options.name), "; allowed: ", allowed); \
  }

template <class Tensors>
void check_rng_state(const Tensors& in, double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p == 0.0 || in.rng_state,
                    "rng_state: got none; allowed with dropout_p > 0: an int64 tensor of seed and offset");
}

void check_options(const AttentionTensors& in, const AttentionOptions& options) {
  FA_ATTENTION_OPTIONS(FA_CHECK_OPTION)
  check_rng_state(in, options.dropout_p);
}

void check_options(const VarlenTensors& in, const VarlenOptions& options) {
  FA_VARLEN_OPTIONS(FA_CHECK_OPTION)
  check_rng_state(in, options.dropout_p);
}

void check_options(const CacheOptions& options) {
  FA_CACHE_OPTIONS(FA_CHECK_OPTION)
  TORCH_CHECK_VALUE(options.dropout_p == 0.0, "dropout_p: got ", options.dropout_p,
                    "; allowed with a cache: 0");
}

#undef FA_CHECK_OPTION

template <class Tensors>
void check_grad_mask(const Tensors& tensors, const GradFlags& flags) {
  const GradMask wanted(flags);
  TORCH_CHECK_VALUE(!wanted.attn_mask || (tensors.attn_mask && tensors.attn_mask->scalar_type() != at::kBool),
                    "grad_mask: got a request for attn_mask's gradient; allowed only with a float attn_mask");
  TORCH_CHECK_VALUE(!wanted.alibi_slopes || tensors.alibi_slopes,
                    "grad_mask: got a request for alibi_slopes' gradient; allowed only with alibi_slopes");
  TORCH_CHECK_VALUE(!wanted.sink || tensors.sink,
                    "grad_mask: got a request for sink's gradient; allowed only with sink");
}

// On CPU the numbers can be read. On CUDA nobody waits for them: kernels keep inside the tensors whatever they are.
std::vector<int64_t> numbers_of(const at::Tensor& t) {
  const at::Tensor numbers = t.to(at::kLong).contiguous();
  const int64_t* data = numbers.const_data_ptr<int64_t>();
  return {data, data + numbers.numel()};
}

void check_sequences(const char* side, const at::Tensor& cu_seqlens, const OptionalTensor& seqused,
                     int64_t total, int64_t longest) {
  const std::vector<int64_t> offsets = numbers_of(cu_seqlens);
  const std::string name = std::string("cu_seqlens_") + side;
  TORCH_CHECK_VALUE(offsets.front() == 0 && offsets.back() == total, name, ": got offsets from ",
                    offsets.front(), " to ", offsets.back(), "; allowed: from 0 to ", total, ", the rows of ",
                    *side == 'q' ? "query" : "key");
  const std::vector<int64_t> used = seqused ? numbers_of(*seqused) : std::vector<int64_t>();
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    const int64_t length = offsets[b + 1] - offsets[b];
    TORCH_CHECK_VALUE(offsets[b] <= offsets[b + 1] && offsets[b + 1] <= total, name, ": got ", offsets[b + 1],
                      " after ", offsets[b], " at ", b + 1, "; allowed: ascending offsets");
    TORCH_CHECK_VALUE(length <= longest, "max_seqlen_", side, ": got ", longest,
                      "; allowed: at least the longest sequence's ", length, " rows");
    TORCH_CHECK_VALUE(used.empty() || (used[b] >= 0 && used[b] <= length), "seqused_", side, ": got ",
                      used.empty() ? 0 : used[b], " at ", b, "; allowed: 0 to the sequence's ", length,
                      " rows");
  }
}

void check_numbers(const VarlenTensors& in, const VarlenOptions& options) {
  if (!in.query.is_cpu()) return;
  const int64_t total_q = in.query.size(0), total_k = in.key.size(0);
  check_sequences("q", in.cu_seqlens_q, in.seqused_q, total_q,
                  options.max_seqlen_q ? options.max_seqlen_q->expect_int() : total_q);
  check_sequences("k", in.cu_seqlens_k, in.seqused_k, total_k,
                  options.max_seqlen_k ? options.max_seqlen_k->expect_int() : total_k);
}

void check_numbers(const CacheTensors& in, const CacheOptions& options) {
  if (!in.query.is_cpu()) return;
  const int64_t total_q = in.query.size(0), rows = in.key.size(1);
  check_sequences("q", in.cu_seqlens_q, std::nullopt, total_q,
                  options.max_seqlen_q ? options.max_seqlen_q->expect_int() : total_q);
  const int64_t pages = in.block_table ? in.block_table->size(1) : 1, caches = in.key.size(0);
  auto check_range = [](const char* name, int64_t b, int64_t number, int64_t low, int64_t high) {
    TORCH_CHECK_VALUE(low <= number && number <= high, name, ": got ", number, " at ", b, "; allowed: ", low,
                      " to ", high);
  };
  const std::vector<int64_t> used = numbers_of(in.seqused_k);
  const std::vector<int64_t> batch_idx = in.batch_idx ? numbers_of(*in.batch_idx) : std::vector<int64_t>();
  const std::vector<int64_t> leftpad = in.leftpad ? numbers_of(*in.leftpad) : std::vector<int64_t>();
  const std::vector<int64_t> table = in.block_table ? numbers_of(*in.block_table) : std::vector<int64_t>();
  TORCH_CHECK_VALUE(in.block_table || in.batch_idx || caches >= static_cast<int64_t>(used.size()),
                    "key: got ", caches, " caches; allowed: at least one for each of the ", used.size(),
                    " sequences");
  for (size_t b = 0; b < used.size(); ++b) {
    check_range("cache_seqlens", b, used[b], 0, rows * pages);
    if (!batch_idx.empty()) check_range("cache_batch_idx", b, batch_idx[b], 0, caches - 1);
    if (!leftpad.empty()) check_range("cache_leftpad", b, leftpad[b], 0, used[b]);
    for (int64_t n = 0; in.block_table && n * rows < used[b]; ++n)
      check_range("block_table", b, table[b * pages + n], 0, caches - 1);
  }
}

void check_tangents(const AttentionTensors& in, const InputTangents& tangents) {
  TORCH_CHECK_VALUE(!tangents.attn_mask || (in.attn_mask && in.attn_mask->scalar_type() != at::kBool),
                    "tangent_attn_mask: got one; allowed only with a float attn_mask");
  TORCH_CHECK_VALUE(!tangents.alibi_slopes || in.alibi_slopes,
                    "tangent_alibi_slopes: got one; allowed only with alibi_slopes");
  TORCH_CHECK_VALUE(!tangents.sink || in.sink, "tangent_sink: got one; allowed only with sink");
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
  check_grad_mask(tensors, options.grad_mask);
}

void check_varlen(const VarlenTensors& tensors, const VarlenOptions& options) {
  check_options(tensors, options);
  check_sizes(check_tensors(tensors, options));
  check_numbers(tensors, options);
}

void check_cache(const CacheTensors& tensors, const CacheOptions& options) {
  check_options(options);
  check_sizes(check_tensors(tensors, options));
  TORCH_CHECK_TYPE(tensors.key.scalar_type() == tensors.value.scalar_type(), "value: got dtype ",
                   name_of(tensors.value.scalar_type()), "; allowed: key's, ",
                   name_of(tensors.key.scalar_type()));
  check_numbers(tensors, options);
}

void check_varlen_backward(const VarlenBackwardTensors& tensors, const VarlenBackwardOptions& options) {
  check_options(tensors.forward(), options.forward());
  check_sizes(check_tensors(tensors, options));
  check_numbers(tensors.forward(), options.forward());
  check_grad_mask(tensors, options.grad_mask);
}

void check_attention_jvp(const AttentionJvpTensors& tensors, const AttentionOptions& options) {
  check_sizes(check_tensors(tensors));
  check_options(tensors.forward(), options);
  check_tangents(tensors.forward(), tensors.tangents());
}

void check_attention_double_backward(const AttentionDoubleBackwardTensors& tensors,
                                     const AttentionBackwardOptions& options) {
  check_sizes(check_tensors(tensors));
  check_attention_backward(tensors.backward(), options);
  check_tangents(tensors.forward(), tensors.tangents());
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
