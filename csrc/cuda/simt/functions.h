// Functions of the user as this tier's kernels read them: a copy of core/program.h's structs in the GPU's memory.
//
// A program is a tensor in the host's memory. An argument of a kernel carries it to the workspace: nothing waits for the
// GPU, and a CUDA graph keeps the argument.
#pragma once

#include "../../core/program.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::simt {

struct DeviceInstruction {
  int64_t immediate[2];  // of a float constant: the bits of the accumulators' type
  int16_t operation, target, from[3], unused;
};

struct DeviceProgram {
  int32_t first = 0, count = 0, result = -1;  // -1: no program

  FA_HOST_DEVICE explicit operator bool() const { return result >= 0; }
};

struct DeviceFunctions {
  static constexpr int64_t kMostInstructions =
      384;                                    // of all programs: arguments of a kernel have 32 KB at most
  static constexpr int64_t kMostValues = 64;  // of one program
  static constexpr int kScore = 0, kGradient = 1;  // the first two values

  DeviceProgram score, gradient, mask;
  const void *captured, *captured_ints;
  BlockStates blocks;
  DeviceInstruction instructions[kMostInstructions];
};

DeviceFunctions device_functions(const UserFunctions& functions, DType dtype);

template <class T>
struct FlexBackwardWorkspace : BackwardWorkspace<T> {
  DeviceFunctions* functions;

  static FlexBackwardWorkspace lay_out(Arena& arena, const BackwardParams& p) {
    return {BackwardWorkspace<T>::lay_out(arena, p), arena.take<DeviceFunctions>(1)};
  }
};

}  // namespace flash_attn_ext::cuda::simt
