// The checks of attention on dense tensors and of the attention weights, and of a tensor's memory.
#include "check_tensors.h"
#include "checks.h"

#include <limits>

namespace flash_attn_ext {
namespace {

constexpr auto kNoMoreSizes = [](DimSizes&) {};
// The weights have no value: its head dimension needs no check.
constexpr auto kNoValue = [](DimSizes& sizes) { sizes[Dim::kHeadDimV] = sizes[Dim::kHeadDim]; };

}  // namespace

void Attention::check(const Tensors& in, const Options& options) {
  check_rows(in, options, kNoMoreSizes);
  check_rng_state(in.rng_state, options.dropout_p);
}

void AttentionBackward::check(const Tensors& in, const Options& options) {
  check_rows(in, options, kNoMoreSizes);
  check_rng_state(in.rng_state, options.dropout_p);
  check_grad_mask(differentiable_of(in), options.grad_mask);
}

void AttentionJvp::check(const Tensors& in, const Options& options) {
  check_rows(in, options, kNoMoreSizes);
  check_rng_state(in.rng_state, options.dropout_p);
  check_tangents(differentiable_of(in), in.tangents());
}

void AttentionDoubleBackward::check(const Tensors& in, const Options& options) {
  check_rows(in, options, kNoMoreSizes);
  check_rng_state(in.rng_state, options.dropout_p);
  check_grad_mask(differentiable_of(in), options.grad_mask);
  check_tangents(differentiable_of(in), in.tangents());
}

void AttentionWeights::check(const Tensors& in, const Options& options) {
  check_rows(in, options, kNoValue);
  check_rng_state(in.rng_state, options.dropout_p);
}

void AttentionWeightsBackward::check(const Tensors& in, const Options& options) {
  check_rows(in, options, kNoValue);
  check_rng_state(in.rng_state, options.dropout_p);
  PerGradient<OptionalTensor> given;
#define FA_COPY(name, ...) given.name = in.name;
  FA_WEIGHTS_DIFFERENTIABLE(FA_COPY)
#undef FA_COPY
  check_grad_mask(given, options.grad_mask);
}

void check_dropout_mask(const at::Tensor& rng_state, c10::ArrayRef<c10::SymInt> sizes, double dropout_p,
                        const c10::SymInt& first_row) {
  TORCH_CHECK_TYPE(rng_state.scalar_type() == at::kLong, "rng_state: got dtype ",
                   name_of(rng_state.scalar_type()), "; allowed: int64");
  check_seed_offset("rng_state", rng_state);
  TORCH_CHECK_VALUE(dropout_p >= 0.0 && dropout_p <= 1.0, "dropout_p: got ", dropout_p, "; allowed: 0 to 1");
  const Dim dims[] = {Dim::kBatch, Dim::kHeads, Dim::kSeqlenQ, Dim::kSeqlenK};
  for (size_t n = 0; n < sizes.size(); ++n)
    TORCH_CHECK_VALUE(sizes[n] >= 0, kDimNames[static_cast<size_t>(dims[n])].name, ": got ", sizes[n],
                      "; allowed: 0 or more");
  const c10::SymInt last =
      std::numeric_limits<int64_t>::max() - sizes[2];  // first_row + seqlen_q must not overflow
  TORCH_CHECK_VALUE(first_row >= 0 && first_row <= last, "first_row: got ", first_row, "; allowed: 0 to ",
                    last);
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
