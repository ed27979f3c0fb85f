// The algorithm text in reading order, and the table of entry points of one ISA. Included once by each
// isa_*.cpp, inside its namespace and target region.

// clang-format off: each file uses what stands above it
#include "../vec/vec-inl.h"
#include "../vec/math-inl.h"
#include "../vec/convert-inl.h"
#include "tiling-inl.h"
#include "frame-inl.h"
#include "gemm-inl.h"
#include "tiles-inl.h"
#include "mask_tile-inl.h"
#include "dropout_tile-inl.h"
#include "scores-inl.h"
#include "masked_gemm-inl.h"
#include "decode-inl.h"
#include "forward-inl.h"
#include "backward_tile-inl.h"
#include "backward_workspace-inl.h"
#include "backward_mask-inl.h"
#include "backward-inl.h"
// clang-format on

std::atomic<int64_t> calls{0};  // forward and backward runs of these kernels

size_t run_forward_workspace(const AttentionParams& p, int threads) {
  return p.dtype == DType::kFloat64 ? forward_workspace<double>(p, threads)
                                    : forward_workspace<float>(p, threads);
}

void run_forward(const AttentionParams& p, void* workspace, const Parallel& parallel) {
  calls.fetch_add(1, std::memory_order_relaxed);
  switch (p.dtype) {
    case DType::kFloat32: return forward<float, float>(p, workspace, parallel);
    case DType::kFloat64: return forward<double, double>(p, workspace, parallel);
    case DType::kBFloat16: return forward<BFloat16, float>(p, workspace, parallel);
    case DType::kFloat16: return forward<Float16, float>(p, workspace, parallel);
    case DType::kBool: return;  // not a type of q: checked in ops/checks.cpp
  }
}

size_t run_backward_workspace(const BackwardParams& p, int threads) {
  return p.dtype == DType::kFloat64 ? backward_workspace<double>(p, threads)
                                    : backward_workspace<float>(p, threads);
}

void run_backward(const BackwardParams& p, void* workspace, const Parallel& parallel) {
  calls.fetch_add(1, std::memory_order_relaxed);
  switch (p.dtype) {
    case DType::kFloat32: return backward<float, float>(p, workspace, parallel);
    case DType::kFloat64: return backward<double, double>(p, workspace, parallel);
    case DType::kBFloat16: return backward<BFloat16, float>(p, workspace, parallel);
    case DType::kFloat16: return backward<Float16, float>(p, workspace, parallel);
    case DType::kBool: return;
  }
}

constexpr Kernels kKernels = {FA_ISA_NAME, &calls, run_forward_workspace, run_forward, run_backward_workspace,
                              run_backward};
