// What ops/ calls of the CPU kernels: one table of functions for each instruction set, all torch-free.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../core/append.h"
#include "../core/params.h"
#include "parallel.h"

namespace flash_attn_ext::cpu {

// One pass over the tiles of the scores. Every size of its params must be at least 1 (without v,
// D_v is 0), and why_not() null for them.
template <class Params>
struct Pass {
  size_t (*workspace)(const Params&, int threads);  // bytes that `run` needs with so many threads
  // `workspace` is aligned to 64; its contents need not be set.
  void (*run)(const Params&, void* workspace, const Parallel&);
};

struct Kernels {
  const char* isa;
  std::atomic<int64_t>* calls;  // runs of any pass so far, for inspection
  Pass<AttentionParams> forward;
  Pass<BackwardParams> backward;
  Pass<JvpParams> jvp;
  Pass<DoubleBackwardParams> double_backward;
  Pass<WeightsParams> weights;
  int64_t (*decode_splits)(const AttentionParams&);  // pieces of the keys; 0: the decode kernel does not run
  int64_t decode_max_queries;                        // up to so many, it runs without being asked for
  void (*append)(const AppendParams&, const Parallel&);
};

// Defined by isa_*.cpp; null where that file's instruction set does not exist on the compiled architecture.
extern const Kernels* const kGenericKernels;
extern const Kernels* const kAvx2Kernels;
extern const Kernels* const kAvx512Kernels;
extern const Kernels* const kAvx512Bf16Kernels;
extern const Kernels* const kAmxKernels;
extern const Kernels* const kNeonKernels;
extern const Kernels* const kNeonBf16Kernels;

}  // namespace flash_attn_ext::cpu
