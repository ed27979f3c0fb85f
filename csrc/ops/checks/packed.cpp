// The checks of the operators on packed sequences and caches.
#include "check_tensors.h"
#include "checks.h"

namespace flash_attn_ext {
namespace {

using c10::SymInt;

template <class Tensors>
void add_sequences(DimSizes& sizes, const Tensors& in) {
  TORCH_CHECK_VALUE(sizes[Dim::kOffsets] >= 1, "cu_seqlens_q: got shape ", in.cu_seqlens_q.sym_sizes(),
                    "; allowed: [sequences + 1]");
  sizes[Dim::kBatch] = sizes[Dim::kOffsets] - 1;
}

void add_longest(SymInt& longest, const std::optional<SymInt>& max_seqlen, const SymInt& total) {
  longest = max_seqlen.value_or(total);
}

template <class Tensors, class Options>
void check_packed_rows(const Tensors& in, const Options& options) {
  check_rows(in, options, [&](DimSizes& sizes) {
    add_sequences(sizes, in);
    add_longest(sizes[Dim::kSeqlenQ], options.max_seqlen_q, sizes[Dim::kTotalQ]);
    add_longest(sizes[Dim::kSeqlenK], options.max_seqlen_k, sizes[Dim::kTotalK]);
  });
  check_rng_state(in.rng_state, options.dropout_p);
}

void check_same_dtype(const char* name, const at::Tensor& t, const char* other, const at::Tensor& of) {
  TORCH_CHECK_TYPE(t.scalar_type() == of.scalar_type(), name, ": got dtype ", name_of(t.scalar_type()),
                   "; allowed: ", other, "'s, ", name_of(of.scalar_type()));
}

// Only 8-bit caches have factors: kernels read other caches in place.
void check_scale(const char* name, const OptionalTensor& scale, const at::Tensor& cache) {
  TORCH_CHECK_VALUE(!scale || (cache.element_size() == 1 && cache.scalar_type() != at::kByte), name,
                    ": got one with a cache of dtype ", name_of(cache.scalar_type()),
                    "; allowed with int8, float8_e4m3fn and float8_e5m2");
}

// The caller's names of an int4 cache and its numbers.
struct Int4Names {
  const char *cache, *scales, *zeros;
};

// Checks the scales and zero points of a cache, and that only caches of uint8 have them.
void check_groups(const Int4Names& names, const at::Tensor& cache, const OptionalTensor& scales,
                  const OptionalTensor& zeros) {
  for (const auto& [name, t] : {std::pair{names.scales, &scales}, std::pair{names.zeros, &zeros}})
    TORCH_CHECK_VALUE(!*t || cache.scalar_type() == at::kByte, name, ": got one with a cache of dtype ",
                      name_of(cache.scalar_type()), "; allowed with uint8, two values of 4 bits a byte");
  if (cache.scalar_type() != at::kByte) return;
  TORCH_CHECK_VALUE(scales, names.cache, ": got dtype uint8 without ", names.scales,
                    "; allowed: both, for values of 4 bits");
  TORCH_CHECK_VALUE(cache.dim() == 4, names.cache, ": got shape ", cache.sym_sizes(),
                    "; allowed: (caches or pages, rows, heads_k, head_dim / 2)");
  for (const auto& [name, given] : {std::pair{names.scales, &scales}, std::pair{names.zeros, &zeros}}) {
    if (!*given) continue;
    const at::Tensor& t = **given;
    TORCH_CHECK_TYPE(t.device() == cache.device(), name, ": got device ", t.device(),
                     "; allowed: the cache's, ", cache.device());
    TORCH_CHECK_TYPE(t.scalar_type() == at::kHalf || t.scalar_type() == at::kFloat, name, ": got dtype ",
                     name_of(t.scalar_type()), "; allowed: float16, float32");
    TORCH_CHECK_TYPE(t.scalar_type() == scales->scalar_type(), name, ": got dtype ", name_of(t.scalar_type()),
                     "; allowed: the dtype of ", names.scales, ", ", name_of(scales->scalar_type()));
    TORCH_CHECK_VALUE(
        t.dim() == 4 && t.sym_size(0) == cache.sym_size(0) && t.sym_size(1) == cache.sym_size(1) &&
            t.sym_size(2) == cache.sym_size(2) && t.sym_size(3) == scales->sym_size(3),
        name, ": got shape ", t.sym_sizes(), "; allowed: [", cache.sym_size(0), ", ", cache.sym_size(1), ", ",
        cache.sym_size(2), ", groups], and one shape for scales and zero points");
    TORCH_CHECK_VALUE(t.sym_size(3) <= 1 || t.sym_stride(3) == 1, name, ": got strides ", t.sym_strides(),
                      "; allowed: a contiguous last dimension");
  }
  const SymInt columns = columns_of(cache), groups = scales->sym_size(3);
  TORCH_CHECK_VALUE(groups >= 1 && columns % groups == 0 && (groups == 1 || columns / groups % 32 == 0),
                    names.scales, ": got ", groups, " groups for ", columns,
                    " columns; allowed: 1, or groups of a multiple of 32 columns");
}

// A tensor with the sizes of the values in an int4 cache, for checks of shapes. Nothing reads its elements.
at::Tensor decoded_shape(const at::Tensor& cache) {
  if (cache.scalar_type() != at::kByte || cache.dim() != 4) return cache;
  c10::SymDimVector sizes(cache.sym_sizes()), strides(cache.sym_strides());
  sizes[3] = columns_of(cache);
  strides[3] = 0;
  return cache.view(at::kChar).as_strided_symint(sizes, strides);
}

// rows * pages must not overflow: an expanded tensor can have sizes near 2^63.
void check_capacity(const at::Tensor& cache, const OptionalTensor& table) {
  if (!table) return;
  const auto rows = cache.sym_size(1).maybe_as_int(), pages = table->sym_size(1).maybe_as_int();
  constexpr int64_t kMost = int64_t{1} << 62;
  TORCH_CHECK_VALUE(!rows || !pages || *pages == 0 || *rows <= kMost / *pages, "block_table: got ",
                    pages.value_or(0), " pages of ", rows.value_or(0),
                    " rows for each sequence; allowed: at most 2^62 rows");
}

void check_rows_contiguous(const char* name, const at::Tensor& cache) {
  TORCH_CHECK_VALUE(cache.sym_size(-1) <= 1 || cache.sym_stride(-1) == 1, name, ": got strides ",
                    cache.sym_strides(), "; allowed: a contiguous last dimension, rows are written to it");
}

}  // namespace

void AttentionVarlen::check(const Tensors& in, const Options& options) { check_packed_rows(in, options); }

void AttentionVarlenBackward::check(const Tensors& in, const Options& options) {
  check_packed_rows(in, options);
  check_grad_mask(differentiable_of(in), options.grad_mask);
}

void AttentionVarlenJvp::check(const Tensors& in, const Options& options) {
  check_packed_rows(in, options);
  check_tangents(differentiable_of(in), in.tangents());
}

void AttentionVarlenDoubleBackward::check(const Tensors& in, const Options& options) {
  check_packed_rows(in, options);
  check_grad_mask(differentiable_of(in), options.grad_mask);
  check_tangents(differentiable_of(in), in.tangents());
}

namespace {

// Returns the tensors with the columns of query that belong to key, if the other columns belong to value.
CacheTensors with_query_of_key(CacheTensors in) {
  TORCH_CHECK_VALUE(in.query.dim() == 3 && in.key.dim() == 4 && in.value.dim() == 4 &&
                        in.query.sym_size(2) == in.key.sym_size(3) + in.value.sym_size(3) &&
                        pack_cache_dtype(in.key.scalar_type()) == CacheDType::kOfQuery,
                    "key_has_value: got query ", in.query.sym_sizes(), ", key ", in.key.sym_sizes(),
                    " and value ", in.value.sym_sizes(),
                    "; allowed: the columns of key and value in query, and no 8-bit caches");
  in.query = in.query.narrow_symint(2, 0, in.key.sym_size(3));
  return in;
}

}  // namespace

void check_latent_rows(const at::Tensor& key, const at::Tensor& value) {
  const auto bytes = [](const at::Tensor& t) {
    return t.sym_storage_offset() + (t.sym_size(0) - 1) * t.sym_stride(0) +
           (t.sym_size(1) - 1) * t.sym_stride(1) + (t.sym_size(2) - 1) * t.sym_stride(2) + kLatentRowBytes;
  };
  TORCH_CHECK_VALUE(key.scalar_type() == at::kFloat8_e4m3fn && key.dim() == 4 && value.dim() == 4 &&
                        key.sym_size(3) == kLatentColumns + kRotaryColumns &&
                        value.sym_size(3) == kLatentColumns && key.sym_stride(3) == 1 &&
                        key.sym_storage_offset() == value.sym_storage_offset() &&
                        key.sym_strides() == value.sym_strides() && key.is_alias_of(value) &&
                        (key.sym_numel() == 0 || bytes(key) <= key.storage().sym_nbytes()),
                    "latent_rows: got key ", key.sym_sizes(), " and value ", value.sym_sizes(),
                    "; allowed: views of the first 576 and 512 bytes of rows of 656 bytes");
}

void AttentionCache::check(const Tensors& given, const Options& options) {
  Tensors in = options.key_has_value ? with_query_of_key(given) : given;
  check_groups({"key", "k_scales", "k_zeros"}, in.key, in.key_group_scale, in.key_group_zero);
  check_groups({"value", "v_scales", "v_zeros"}, in.value, in.value_group_scale, in.value_group_zero);
  check_scale("k_descale", in.key_scale, in.key);
  check_scale("v_descale", in.value_scale, in.value);
  const at::Tensor key = in.key, value = in.value;  // decoded_shape() has int8 in place of uint8
  in.key = decoded_shape(in.key);
  in.value = decoded_shape(in.value);
  if (options.latent_rows) {
    check_latent_rows(in.key, in.value);
    TORCH_CHECK_VALUE(!in.key_scale && !in.value_scale, "k_descale, v_descale: got one with latent_rows; ",
                      "allowed: neither");
  }
  check_rows(in, options, [&](DimSizes& sizes) {
    add_sequences(sizes, in);
    add_longest(sizes[Dim::kSeqlenQ], options.max_seqlen_q, sizes[Dim::kTotalQ]);
  });
  check_same_dtype("value", value, "key", key);
  check_capacity(in.key, in.block_table);
}

void AppendToCache::check(const Tensors& given, const Options& options) {
  Tensors in = given;
  check_groups({"key_cache", "k_scales", "k_zeros"}, in.key_cache, in.key_group_scale, in.key_group_zero);
  check_groups({"value_cache", "v_scales", "v_zeros"}, in.value_cache, in.value_group_scale,
               in.value_group_zero);
  check_rows_contiguous("key_cache", in.key_cache);
  check_rows_contiguous("value_cache", in.value_cache);
  check_scale("k_descale", in.key_scale, in.key_cache);
  check_scale("v_descale", in.value_scale, in.value_cache);
  in.key_cache = decoded_shape(in.key_cache);
  in.value_cache = decoded_shape(in.value_cache);
  check_rows(in, options, [&](DimSizes& sizes) { add_sequences(sizes, in); });
  check_same_dtype("value_cache", given.value_cache, "key_cache", given.key_cache);
  check_capacity(in.key_cache, in.block_table);
  TORCH_CHECK_VALUE(in.rotary_cos.has_value() == in.rotary_sin.has_value(),
                    "rotary_cos: got one of rotary_cos and rotary_sin; allowed: both or none");
  TORCH_CHECK_VALUE(
      !in.rotary_cos || in.rotary_cos->sym_size(1) == in.rotary_sin->sym_size(1), "rotary_sin: got shape ",
      in.rotary_sin ? in.rotary_sin->sym_sizes() : c10::SymIntArrayRef(), "; allowed: that of rotary_cos");
  TORCH_CHECK_VALUE(!in.block_table || !in.cache_batch_idx,
                    "cache_batch_idx: got one with block_table; allowed: one of them");
}

}  // namespace flash_attn_ext
