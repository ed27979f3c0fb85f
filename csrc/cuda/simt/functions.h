// The GPU's copy of functions of the user (core/program.h).
//
// A program is a tensor in host memory. A kernel argument copies it to the workspace. So the host does not wait for the
// GPU, and a CUDA graph stores the argument.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/program.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::simt {

struct DeviceInstruction {
  int64_t immediate[2];  // of a float constant: the bits of the accumulators' type
  int16_t operation, target, from[3], unused;
};

struct DeviceProgram {
  int32_t first = 0, count = 0, result = -1;  // -1: no program

  FA_HOST_DEVICE explicit operator bool() const { return count > 0 || result >= 0; }
};

// Sums of the gradients of captured elements: captured.cuh.
struct CapturedSums {
  enum Pass : int32_t { kFindLargest, kAdd };

  unsigned long long *largest = nullptr, *sums = nullptr;  // captured_count elements each; null: not wanted
  int32_t log2_count = 0;  // an element has at most 2^log2_count contributions
  Pass pass = kFindLargest;

  FA_HOST_DEVICE explicit operator bool() const { return sums != nullptr; }
};

struct DeviceFunctions {
  static constexpr int64_t kMostInstructions =
      384;                                    // of all programs: arguments of a kernel have 32 KB at most
  static constexpr int64_t kMostValues = 64;  // of one program
  static constexpr int kScore = 0, kGradient = 1;  // the first two values

  DeviceProgram score, gradient, captured_gradient, mask;
  CapturedSums captured_sums;
  const void *captured, *captured_ints;
  BlockStates blocks;
  DeviceInstruction instructions[kMostInstructions];
};

// `sums`: sums of the gradients of captured elements, if they are wanted.
DeviceFunctions device_functions(const UserFunctions& functions, DType dtype, const CapturedSums& sums = {});

// An upper bound for log2 of the number of contributions to one captured element.
int32_t log2_contributions(const BackwardParams& p);

template <class T>
struct FlexBackwardWorkspace : BackwardWorkspace<T> {
  DeviceFunctions* functions;
  CapturedSums captured;

  static FlexBackwardWorkspace lay_out(Arena& arena, const BackwardParams& p) {
    const int64_t count = p.functions->dcaptured ? p.functions->captured_count : 0;
    FlexBackwardWorkspace w{BackwardWorkspace<T>::lay_out(arena, p), arena.take<DeviceFunctions>(1)};
    if (count > 0)
      w.captured = {arena.take<unsigned long long>(count), arena.take<unsigned long long>(count),
                    log2_contributions(p)};
    return w;
  }
};

// The backward's steps, for the tier sm80: the terms of each query row, then the gradients that are wanted.
using FlexBackwardStep = cudaError_t(const BackwardParams&, const FlexBackwardWorkspace<float>&,
                                     cudaStream_t);
FlexBackwardStep flex_row_terms_bfloat16, flex_row_terms_float16, flex_gradients_bfloat16,
    flex_gradients_float16;

}  // namespace flash_attn_ext::cuda::simt
