// Every check of an operator's arguments. Each device's kernel and the Meta kernel call these first, so that
// a bad call fails with the same words everywhere, also while it is traced. Messages name the argument, what
// was got and what is allowed.
#pragma once

#include "ops.h"

namespace flash_attn_ext {

// Throw TypeError (dtype, device) or ValueError (everything else).
void check_attention(const AttentionTensors& tensors, const AttentionOptions& options);
void check_options(const AttentionTensors& tensors, const AttentionOptions& options);
void check_attention_jvp(const AttentionJvpTensors& tensors, const AttentionOptions& options);
void check_attention_double_backward(const AttentionDoubleBackwardTensors& tensors,
                                     const AttentionBackwardOptions& options);
void check_attention_backward(const AttentionBackwardTensors& tensors,
                              const AttentionBackwardOptions& options);
void check_dropout_mask(const at::Tensor& rng_state, c10::ArrayRef<c10::SymInt> sizes, double dropout_p,
                        const c10::SymInt& first_row);

// Throws ValueError if the memory that `t` shows is not all there: FSDP, and untyped_storage().resize_(0), free storage
// under a tensor. For kernels that read: a tensor without data, as on the Meta device, has none by right.
void check_storage(const char* name, const at::Tensor& t);
template <class Tensors>
void check_storages(const Tensors& tensors) {
  for_each_tensor(tensors, [](const TensorRule& rule, const auto& optional) {
    if (const at::Tensor* t = tensor_or_null(optional)) check_storage(rule.name, *t);
  });
}

}  // namespace flash_attn_ext
