// The checks that need more than the shapes: memory, and the numbers in index tensors. Op::check (dense/attention.h)
// comes first. So a call with several faults raises the same error on every device, also during tracing:
//
//   1. each option by its row            checks/options.cpp
//   2. each tensor by its row            checks/check_tensors.cpp: devices and dtypes, then shapes
//   3. sizes and arguments that depend on each other   checks/dense.cpp, packed.cpp, cache.cpp
//   4. memory that was freed             check_storages()
//   5. numbers in index tensors on CPU   check_numbers()
//
// A message names the argument, the value that it got, and the values that are allowed.
#pragma once

#include "../cache/append.h"
#include "../flex/flex.h"
#include "../weights/weights.h"

namespace flash_attn_ext {

// Throws ValueError if the storage of `t` is smaller than its elements need: FSDP and untyped_storage().resize_(0) free
// the storage of a tensor. Only for kernels: a tensor on the Meta device has no storage.
void check_storage(const char* name, const at::Tensor& t);
template <class Tensors>
void check_storages(const Tensors& tensors) {
  for_each_present_tensor(tensors,
                          [](const TensorRule& rule, const at::Tensor& t) { check_storage(rule.name, t); });
}

// Checks offsets, lengths and page numbers on CPU. On CUDA reading them would wait for the GPU: they are not checked
// there, and the kernels stay inside the tensors for every number.
void check_numbers(const VarlenTensors& in, const VarlenOptions& options);
void check_numbers(const CacheTensors& in, const CacheOptions& options);
// Also checks that no row of a cache is written twice, and that no input shares memory with a cache.
void check_numbers(const AppendTensors& in, const AppendOptions& options);

inline void check_numbers(const VarlenBackwardTensors& in, const VarlenBackwardOptions& options) {
  check_numbers(in.forward(), options.forward());
}
inline void check_numbers(const VarlenJvpTensors& in, const VarlenOptions& options) {
  check_numbers(in.forward(), options);
}
inline void check_numbers(const VarlenDoubleBackwardTensors& in, const VarlenBackwardOptions& options) {
  check_numbers(in.forward(), options.forward());
}
inline void check_numbers(const VarlenFlexTensors& in, const VarlenFlexOptions& options) {
  check_numbers(in.base(), options.base());
}
inline void check_numbers(const VarlenFlexBackwardTensors& in, const VarlenFlexBackwardOptions& options) {
  check_numbers(in.base(), options.base());
}
inline void check_numbers(const CacheFlexTensors& in, const CacheFlexOptions& options) {
  check_numbers(in.base(), options.base());
}
// The other operators have no index tensors.
template <class Tensors, class Options>
void check_numbers(const Tensors&, const Options&) {}

// Steps 4 and 5.
template <class Tensors, class Options>
void check_contents(const Tensors& tensors, const Options& options) {
  if (tensors.query.is_meta()) return;
  check_storages(tensors);
  if (tensors.query.is_cpu()) check_numbers(tensors, options);
}

void check_dropout_mask(const at::Tensor& rng_state, c10::ArrayRef<c10::SymInt> sizes, double dropout_p,
                        const c10::SymInt& first_row);

}  // namespace flash_attn_ext
