// The door between ops/ and the CPU kernels: one table of functions per instruction set, all torch-free.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../core/params.h"
#include "parallel.h"

namespace flash_attn_ext::cpu {

// `workspace` holds at least the bytes that the matching *_workspace function returns for the same params and
// number of threads, aligned to 64; its contents need not be set. Every size must be at least 1.
struct Kernels {
  const char* isa;
  std::atomic<int64_t>* calls;  // runs of any pass so far, for inspection
  size_t (*forward_workspace)(const AttentionParams&, int threads);
  void (*forward)(const AttentionParams&, void* workspace, const Parallel&);
  size_t (*backward_workspace)(const BackwardParams&, int threads);
  void (*backward)(const BackwardParams&, void* workspace, const Parallel&);
  int64_t (*decode_splits)(const AttentionParams&);  // pieces of the keys; 0: the decode kernel does not run
  int64_t decode_max_queries;                        // up to which it runs unasked
  size_t (*jvp_workspace)(const JvpParams&, int threads);
  void (*jvp)(const JvpParams&, void* workspace, const Parallel&);
  size_t (*double_backward_workspace)(const DoubleBackwardParams&, int threads);
  void (*double_backward)(const DoubleBackwardParams&, void* workspace, const Parallel&);
};

// Defined by isa_*.cpp; null where that file's instruction set does not exist on the compiled architecture.
extern const Kernels* const kGenericKernels;
extern const Kernels* const kAvx2Kernels;
extern const Kernels* const kAvx512Kernels;
extern const Kernels* const kAvx512Bf16Kernels;

}  // namespace flash_attn_ext::cpu
