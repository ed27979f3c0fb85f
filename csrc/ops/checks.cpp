#include "checks.h"

#include "check_tensors.h"

namespace flash_attn_ext {

void check_options(const AttentionTensors& in, const AttentionOptions& options) {
  FA_ATTENTION_OPTIONS(FA_CHECK_OPTION)
  check_rng_state(in, options.dropout_p);
}

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
  TORCH_CHECK_VALUE(first_row >= 0, "first_row: got ", first_row, "; allowed: 0 or more");
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
