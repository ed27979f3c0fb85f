// The table of entry points of one ISA. Included once by each isa_*.cpp, inside its namespace and target
// region. Each -inl.h includes what it uses; csrc/README.md has them in reading order.
#pragma once

#include "append-inl.h"
#include "backward-inl.h"
#include "double_backward-inl.h"
#include "forward-inl.h"
#include "jvp-inl.h"
#include "weights-inl.h"

std::atomic<int64_t> calls{0};  // runs of these kernels

template <class In_, class T_>
struct Types {
  using In = In_;  // of q, k, v
  using T = T_;    // of accumulators
};

// others(): the table that takes a dtype which this one does not have; null where this one has it.
// for_types_of(): body(Types<...>{}) for the types that belong to q's dtype.
#if defined(FA_OTHER_DTYPES)  // this one has bfloat16 only

const Kernels* others(DType dtype) { return dtype == DType::kBFloat16 ? nullptr : FA_OTHER_DTYPES; }

template <class Body>
auto for_types_of(DType, const Body& body) {
  return body(Types<BFloat16, float>{});
}

#else

const Kernels* others(DType) { return nullptr; }

template <class Body>
auto for_types_of(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat64: return body(Types<double, double>{});
    case DType::kBFloat16: return body(Types<BFloat16, float>{});
    case DType::kFloat16: return body(Types<Float16, float>{});
    case DType::kFloat32:
    case DType::kBool: break;  // kBool is not a type of q: checked in ops/checks.cpp
  }
  return body(Types<float, float>{});
}

#endif

// run_NAME and run_NAME_workspace, which call the templates of that name for the types of a call.
#define FA_PASS(name, Params)                                                           \
  size_t run_##name##_workspace(const Params& p, int threads) {                         \
    if (const Kernels* k = others(p.dtype)) return k->name.workspace(p, threads);       \
    return for_types_of(p.dtype, [&](auto types) {                                      \
      using Of = decltype(types);                                                       \
      return name##_workspace<typename Of::In, typename Of::T>(p, threads);             \
    });                                                                                 \
  }                                                                                     \
  void run_##name(const Params& p, void* workspace, const Parallel& parallel) {         \
    if (const Kernels* k = others(p.dtype)) return k->name.run(p, workspace, parallel); \
    calls.fetch_add(1, std::memory_order_relaxed);                                      \
    for_types_of(p.dtype, [&](auto types) {                                             \
      using Of = decltype(types);                                                       \
      name<typename Of::In, typename Of::T>(p, workspace, parallel);                    \
    });                                                                                 \
  }

FA_PASS(forward, AttentionParams)
FA_PASS(backward, BackwardParams)
FA_PASS(jvp, JvpParams)
FA_PASS(double_backward, DoubleBackwardParams)
FA_PASS(weights, WeightsParams)
#undef FA_PASS

int64_t decode_splits(const AttentionParams& p) {
  if (const Kernels* k = others(p.dtype)) return k->decode_splits(p);
  if (!is_decode(p)) return 0;
  return for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    return plan_decode<typename Of::T>(p).splits;
  });
}

void run_append(const AppendParams& p, const Parallel& parallel) {
  if (const Kernels* k = others(p.dtype)) return k->append(p, parallel);
  for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    append<typename Of::In, typename Of::T>(p, parallel);
  });
}

constexpr Kernels kKernels = {FA_ISA_NAME,
                              &calls,
                              {run_forward_workspace, run_forward},
                              {run_backward_workspace, run_backward},
                              {run_jvp_workspace, run_jvp},
                              {run_double_backward_workspace, run_double_backward},
                              {run_weights_workspace, run_weights},
                              decode_splits,
                              kDecodeMaxQueries,
                              run_append};
