// The table of operators. Schemas, the dispatch keys Meta, CPU and CUDA, and the bindings for explain and for the tests
// follow from it. dense/attention.h lists the functions of an operator: check, empty, pack.
#pragma once

#include "cache/append.h"
#include "cache/kvcache.h"
#include "checks/checks.h"
#include "dense/pack_params.h"
#include "flex/flex.h"
#include "indexed/indexed.h"
#include "int8/int8.h"
#include "packed/varlen.h"
#include "weights/weights.h"

namespace flash_attn_ext {

// Operators with kernels on every device.
using KernelOperators = Types<Attention, AttentionBackward, AttentionJvp, AttentionDoubleBackward,  // dense
                              AttentionVarlen, AttentionVarlenBackward, AttentionVarlenJvp,
                              AttentionVarlenDoubleBackward,               // packed
                              AttentionCache,                              // cache
                              AttentionWeights, AttentionWeightsBackward,  // weights
                              AttentionIndexed, AttentionIndexedBackward,  // lists of keys
                              AttentionFlex, AttentionFlexBackward,        // functions of the user
                              AttentionVarlenFlex, AttentionVarlenFlexBackward, AttentionCacheFlex>;
// Operators with kernels on CPU only that are written in Python: flash_attn_ext/flex/derivatives.py.
using PythonKernelOperators =
    Types<AttentionFlexJvp, AttentionFlexDoubleBackward, AttentionVarlenFlexJvp,
          AttentionVarlenFlexDoubleBackward, AttentionIndexedJvp, AttentionIndexedDoubleBackward>;
// Operators with kernels on CPU only.
using CpuOperators = Types<AttentionInt8>;
// Operators that write to caches. On CUDA, append_to_cache is written in Python: flash_attn_ext/_append.py.
using CacheWriters = Types<AppendToCache>;
// Operators that users call under autocast. Derivatives get tensors that are already cast.
using AutocastOperators = Types<Attention, AttentionVarlen, AttentionWeights, AttentionFlex,
                                AttentionVarlenFlex, AttentionIndexed, AttentionInt8>;

// Calls visit(operator_tag) for each operator; decltype(operator_tag)::Op is the operator.
template <class T>
struct OperatorTag {
  using Op = T;
};
template <class... Op, class Visit>
void for_each_operator(Types<Op...>, const Visit& visit) {
  (visit(OperatorTag<Op>{}), ...);
}

inline void store_gradients(const PerHead<at::Tensor>& per_head, const Gradients& result) {
  store_per_head_gradients(per_head, result);
}
inline void store_gradients(const PerHead<at::Tensor>& per_head, const FlexGradients& result) {
  store_per_head_gradients(per_head, result.base());
}
// Kernels write the results of the other operators.
template <class Result>
void store_gradients(const PerHead<at::Tensor>&, const Result&) {}

// The steps of every call. run(packed, result) runs the kernels, or writes the result without them.
template <class Op, class Run>
typename Op::Result compute(const typename Op::Tensors& given, const typename Op::Options& options,
                            const Run& run) {
  Op::check(given, options);
  check_contents(given, options);
  typename Op::Result result = Op::empty(given, options);
  run(result);
  return result;
}

// Packs the params, calls run(packed) and stores the gradients that kernels wrote in parts.
template <class Op, class Run>
void pack_and_run(const typename Op::Tensors& given, const typename Op::Options& options,
                  const typename Op::Result& result, const Run& run) {
  const Packed<Op> packed = Op::pack(given, options, result);
  run(packed);
  store_gradients(packed.per_head, result);
}

}  // namespace flash_attn_ext
