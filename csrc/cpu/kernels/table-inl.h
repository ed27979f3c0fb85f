// The table of entry points of one ISA. Included once by each isa_*.cpp, inside its namespace and target
// region. Each -inl.h includes what it uses; csrc/README.md has them in reading order.
#pragma once

#include "backward-inl.h"
#include "double_backward-inl.h"
#include "forward-inl.h"
#include "jvp-inl.h"

std::atomic<int64_t> calls{0};  // runs of these kernels

template <class In_, class T_>
struct Types {
  using In = In_;  // of q, k, v
  using T = T_;    // of accumulators
};

// body(Types<...>{}) for the types that belong to q's dtype.
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

size_t run_forward_workspace(const AttentionParams& p, int threads) {
  return for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    return forward_workspace<typename Of::In, typename Of::T>(p, threads);
  });
}

void run_forward(const AttentionParams& p, void* workspace, const Parallel& parallel) {
  calls.fetch_add(1, std::memory_order_relaxed);
  for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    forward<typename Of::In, typename Of::T>(p, workspace, parallel);
  });
}

size_t run_backward_workspace(const BackwardParams& p, int threads) {
  return for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    return backward_workspace<typename Of::In, typename Of::T>(p, threads);
  });
}

void run_backward(const BackwardParams& p, void* workspace, const Parallel& parallel) {
  calls.fetch_add(1, std::memory_order_relaxed);
  for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    backward<typename Of::In, typename Of::T>(p, workspace, parallel);
  });
}

size_t run_jvp_workspace(const JvpParams& p, int threads) {
  return for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    return jvp_workspace<typename Of::In, typename Of::T>(p, threads);
  });
}

void run_jvp(const JvpParams& p, void* workspace, const Parallel& parallel) {
  calls.fetch_add(1, std::memory_order_relaxed);
  for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    jvp<typename Of::In, typename Of::T>(p, workspace, parallel);
  });
}

size_t run_double_backward_workspace(const DoubleBackwardParams& p, int threads) {
  return for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    return double_backward_workspace<typename Of::In, typename Of::T>(p, threads);
  });
}

void run_double_backward(const DoubleBackwardParams& p, void* workspace, const Parallel& parallel) {
  calls.fetch_add(1, std::memory_order_relaxed);
  for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    double_backward<typename Of::In, typename Of::T>(p, workspace, parallel);
  });
}

int64_t decode_splits(const AttentionParams& p) {
  if (!is_decode(p)) return 0;
  return for_types_of(p.dtype, [&](auto types) {
    using Of = decltype(types);
    return plan_decode<typename Of::T>(p).splits;
  });
}

constexpr Kernels kKernels = {FA_ISA_NAME,
                              &calls,
                              run_forward_workspace,
                              run_forward,
                              run_backward_workspace,
                              run_backward,
                              decode_splits,
                              kDecodeMaxQueries,
                              run_jvp_workspace,
                              run_jvp,
                              run_double_backward_workspace,
                              run_double_backward};
