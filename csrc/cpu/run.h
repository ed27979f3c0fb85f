// The interface between ops/ and the CPU kernels: one table of functions per instruction set, without torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "../core/append.h"
#include "../core/indexed.h"
#include "../core/indexer.h"
#include "../core/params.h"
#include "parallel.h"
#include "tile_frame.h"

namespace flash_attn_ext::cpu {

// One pass: forward, backward, jvp, double backward, weights, attention by index, or its backward. Every size in the
// params must be at least 1 (without v, D_v is 0), and why_not(params) must return null.
template <class Params>
struct Pass {
  size_t (*workspace)(const Params&, int threads);  // bytes of memory that `run` needs with `threads` threads
  // `workspace` is aligned to 64 bytes. Its contents may be uninitialised.
  void (*run)(const Params&, void* workspace, const Parallel&);
};

// Decode's functions for bfloat16 that do not use tile registers. The table for AMX calls them in the table without AMX. Each
// table has types with the names of the comments and with the same members.
struct FewRowFunctions {
  void (*decode_task)(const AttentionParams&, const void* key_splits,  // DecodeSplits
                      const void* scratch,                             // DecodeScratch<BFloat16, float>
                      const void* task, const void* results);          // DecodeTask, SplitResults<float>
  // `many`: ManyRows<BFloat16, float>.
  void (*load_queries)(const void* many, const AttentionParams&, int64_t n, const void* from, int64_t ldq,
                       int64_t rows);
  void (*load_scores)(const void* many, int64_t n, int64_t rows, const void* keys,  // Rows<BFloat16>
                      int64_t j, int64_t count, float scale, const void* to,        // LaneTile<float>
                      void* ahead);                                                 // Prefetcher
  void (*add_values)(const void* many, const void* probs, int64_t rows,             // AllProbs<float>
                     const void* values, int64_t count, float* out, int64_t ldo,    // Rows<BFloat16>
                     void* ahead);
};

struct Kernels {
  const char* isa;
  std::atomic<int64_t>* calls;  // how often these kernels ran
  Pass<AttentionParams> forward;
  Pass<BackwardParams> backward;
  Pass<JvpParams> jvp;
  Pass<DoubleBackwardParams> double_backward;
  Pass<WeightsParams> weights;
  Pass<IndexedParams> indexed;
  Pass<IndexedBackwardParams> indexed_backward;
  int64_t (*decode_splits)(
      const AttentionParams&);  // number of splits of the keys; 0: the decode kernel does not run
  int64_t decode_max_queries;   // the decode kernel runs by default up to this number of queries
  void (*append)(const AppendParams&, const Parallel&);
  Pass<IndexerTopkParams> indexer_topk;
  Pass<IndexerScoresParams> indexer_scores;
  Pass<IndexerScoresBackwardParams> indexer_scores_backward;
  Pass<IndexerLossParams> indexer_loss;
  Pass<IndexerLossBackwardParams> indexer_loss_backward;
  const TileFunctions* tile_functions;
  const FewRowFunctions* few_rows;  // null in tables that no table for AMX calls
};

// isa_*.cpp define these. Null if the compiled architecture does not have the instruction set.
extern const Kernels* const kGenericKernels;
extern const Kernels* const kAvx2Kernels;
extern const Kernels* const kAvx512Kernels;
extern const Kernels* const kAvx512Bf16Kernels;
extern const Kernels* const kAmxKernels;
extern const Kernels* const kNeonKernels;
extern const Kernels* const kNeonBf16Kernels;

}  // namespace flash_attn_ext::cpu
