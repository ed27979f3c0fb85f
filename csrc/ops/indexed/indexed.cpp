#include "indexed.h"

#include <ATen/Parallel.h>

#include <limits>
#include <mutex>

#include "../checks/check_tensors.h"
#include "../dense/pack_params.h"

namespace flash_attn_ext {
namespace {

// The name of the argument of flash_attn.
const char* name_of_indices(const IndexedOptions& options) {
  return options.key_block_size > 0 ? "key_block_indices" : "key_indices";
}

void check_key_indices(const IndexedTensors& in, const IndexedOptions& options) {
  const char* name = name_of_indices(options);
  TORCH_CHECK_VALUE(in.key_indices, name, ": got None; allowed: a tensor");
  const at::Tensor& t = *in.key_indices;
  const c10::SymInt batch = in.query.sym_size(0), heads_kv = in.key.sym_size(1), rows = in.query.sym_size(2);
  TORCH_CHECK_VALUE(t.dim() == 4 && (t.sym_size(0) == 1 || t.sym_size(0) == batch) &&
                        (t.sym_size(1) == 1 || t.sym_size(1) == heads_kv) && t.sym_size(2) == rows,
                    name, ": got shape ", t.sym_sizes(),
                    "; allowed: (batch or 1, heads_kv or 1, seqlen_q, any number) = [", batch, ", ", heads_kv,
                    ", ", rows, ", ...]");
  const int64_t most = std::numeric_limits<int32_t>::max();
  TORCH_CHECK_VALUE(in.key.sym_size(2) <= most, "key: got ", in.key.sym_size(2), " rows with ", name,
                    "; allowed: at most ", most);
  TORCH_CHECK_VALUE(options.num_splits <= 1 && !options.unified_max, "num_splits, unified_max: got one with ",
                    name, "; allowed: neither");
  if (!in.dropout_places) return;
  const at::Tensor& places = *in.dropout_places;
  TORCH_CHECK_VALUE(places.dim() == 2 && places.sym_size(0) == rows && places.sym_size(1) == 4 &&
                        places.is_contiguous() && batch == 1,
                    "dropout_places: got shape ", places.sym_sizes(), " for batch ", batch,
                    "; allowed: contiguous, (seqlen_q, 4) = [", rows, ", 4], for batch 1");
  TORCH_CHECK_VALUE(!in.rng_state || in.rng_state->sym_size(0) == 2, "rng_state: got shape ",
                    in.rng_state->sym_sizes(), " with dropout_places; allowed: [2]");
}

void check_mask_gradient(bool wanted, const IndexedOptions& options) {
  TORCH_CHECK_NOT_IMPLEMENTED(!wanted, "attn_mask: got a tensor that needs a gradient with ",
                              name_of_indices(options),
                              "; allowed: one that does not, such as attn_mask.detach()");
}

template <class Index>
void check_range(const at::Tensor& t, int64_t limit, const char* name, const char* unit) {
  constexpr int64_t kSerial = 1 << 15;
  const Index* numbers = t.const_data_ptr<Index>();
  std::mutex mutex;
  int64_t least = 0, most = -1;
  at::parallel_for(0, t.numel(), kSerial, [&](int64_t begin, int64_t end) {
    Index low = 0, high = -1;
    for (int64_t n = begin; n < end; ++n) {
      high = std::max(high, numbers[n]);
      low = std::min(low, numbers[n]);
    }
    const std::lock_guard<std::mutex> lock(mutex);
    least = std::min<int64_t>(least, low);
    most = std::max<int64_t>(most, high);
  });
  TORCH_CHECK_VALUE(least >= -1 && most < limit, name, ": got ", least < -1 ? least : most,
                    "; allowed: -1 (none) to ", limit - 1, ", the last ", unit, " of key");
}

KeyIndices pack_indices(const at::Tensor& t, const IndexedOptions& options) {
  KeyIndices indices;
  indices.numbers = pack_offsets(t);
  indices.count = t.size(3);
  indices.stride_b = t.size(0) == 1 ? 0 : t.size(1) * t.size(2) * t.size(3);
  indices.stride_h = t.size(1) == 1 ? 0 : t.size(2) * t.size(3);
  indices.block_size = std::max<int64_t>(options.key_block_size, 1);
  return indices;
}

void set_dropout_places(DropoutParams& dropout, const OptionalTensor& places) {
  if (!dropout || !places) return;
  dropout.place = places->const_data_ptr<int64_t>();
  dropout.place_stride = places->size(1);
}

}  // namespace

void IndexedOptions::check() const {
  attention().check();
  TORCH_CHECK_VALUE(key_block_size >= 0, "key_block_size: got ", key_block_size, "; allowed: 1 or more");
}
void IndexedBackwardOptions::check() const { forward().check(); }

void AttentionIndexed::check(const Tensors& in, const Options& options) {
  if (options.latent_rows)
    check_latent_rows(in.key, in.value);
  else
    Attention::check(in.attention(), options.attention());  // key and value have query's dtype
  check_rows(in, options, [](DimSizes&) {});
  check_rng_state(in.rng_state, options.dropout_p);
  check_key_indices(in, options);
  check_mask_gradient(at::GradMode::is_enabled() && in.attn_mask && in.attn_mask->requires_grad(), options);
}

void AttentionIndexedBackward::check(const Tensors& in, const Options& options) {
  check_rows(in, options, [](DimSizes&) {});
  check_rng_state(in.rng_state, options.dropout_p);
  check_grad_mask(differentiable_of(in), options.grad_mask);
  check_key_indices(in.forward(), options.forward());
  check_mask_gradient(GradMask(options.grad_mask).attn_mask, options.forward());
}

// Without pack(): the kernels are written in Python.
void AttentionIndexedJvp::check(const Tensors& in, const Options& options) {
  AttentionJvp::check(in.attention(), options.attention());
  check_key_indices(in.forward(), options);
}

void AttentionIndexedDoubleBackward::check(const Tensors& in, const Options& options) {
  AttentionDoubleBackward::check(in.attention(), options.attention());
  check_key_indices(in.forward(), options.forward());
}

void check_numbers(const IndexedTensors& in, const IndexedOptions& options) {
  const int64_t block = std::max<int64_t>(options.key_block_size, 1), keys = in.key.size(2);
  const int64_t limit = keys / block + (keys % block != 0);
  const at::Tensor numbers = in.key_indices->contiguous();
  const char *name = name_of_indices(options), *unit = options.key_block_size > 0 ? "block" : "row";
  if (numbers.scalar_type() == at::kLong)
    check_range<int64_t>(numbers, limit, name, unit);
  else
    check_range<int32_t>(numbers, limit, name, unit);
}

AttentionResult AttentionIndexed::empty(const Tensors& in, const Options& options) {
  return Attention::empty(in.attention(), options.attention());
}

Gradients AttentionIndexedBackward::empty(const Tensors& in, const Options& options) {
  return AttentionBackward::empty(in.attention(), options.attention());
}

AttentionJvpResult AttentionIndexedJvp::empty(const Tensors& in, const Options& options) {
  return AttentionJvp::empty(in.attention(), options.attention());
}

Gradients AttentionIndexedDoubleBackward::empty(const Tensors& in, const Options& options) {
  return AttentionDoubleBackward::empty(in.attention(), options.attention());
}

Packed<AttentionIndexed> AttentionIndexed::pack(const Tensors& given, const Options& options,
                                                const Result& result) {
  Packed<AttentionIndexed> packed{to_kernel_layout(given), {}, {}};
  static_cast<AttentionParams&>(packed.params) =
      pack_attention(packed.tensors.attention(), result.out, result.lse, options.attention());
  if (options.latent_rows) packed.params.varlen.cache.dtype = CacheDType::kLatent;
  packed.params.indices = pack_indices(*packed.tensors.key_indices, options);
  set_dropout_places(packed.params.dropout, packed.tensors.dropout_places);
  return packed;
}

Packed<AttentionIndexedBackward> AttentionIndexedBackward::pack(const Tensors& given, const Options& options,
                                                                const Result& result) {
  Packed<AttentionIndexedBackward> packed{to_kernel_layout(given), {}, {}};
  fill_grad_out(packed.tensors);
  packed.per_head = empty_per_head(result, given.lse, given.query.size(0), given.query.size(1));
  pack_backward(packed.params, packed.tensors.attention(), options.attention(), result, packed.per_head);
  packed.params.indices = pack_indices(*packed.tensors.key_indices, options.forward());
  set_dropout_places(packed.params.dropout, packed.tensors.dropout_places);
  return packed;
}

}  // namespace flash_attn_ext
