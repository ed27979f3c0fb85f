// The table of entry points of one ISA. Included once by each isa_*.cpp, inside its namespace and target
// region. Each -inl.h includes the headers that it uses. csrc/README.md lists the files in reading order.
#pragma once

#include "append-inl.h"
#include "backward-inl.h"
#include "double_backward-inl.h"
#include "forward-inl.h"
#include "indexed_backward-inl.h"
#include "indexer_chosen-inl.h"
#include "indexer_loss-inl.h"
#include "indexer_topk-inl.h"
#include "jvp-inl.h"
#include "weights-inl.h"

std::atomic<int64_t> calls{0};  // how often these kernels ran

template <class In_, class T_>
struct Types {
  using In = In_;  // of q, k, v
  using T = T_;    // of accumulators
  // The operands of products. If no product multiplies 16 bits, rows are widened while they are loaded. Then a pass is
  // compiled once for float32, bfloat16 and float16: for_row_type().
#if defined(FA_OTHER_DTYPES) || defined(FA_DOT_BFLOAT16)
  using Operand = In;
#else
  using Operand = T;
#endif
};

// other_kernels(p): the table that runs this call in place of this table, or null. for_types_of(p, body): returns
// body(Types<...>{}) for the types that belong to q's dtype.
#if defined(FA_OTHER_DTYPES)  // this table has kernels for bfloat16 only

template <class Params>
const Kernels* other_kernels(const Params& p) {
  return p.dtype == DType::kBFloat16 ? nullptr : FA_OTHER_DTYPES;
}

template <class Params, class Body>
auto for_types_of(const Params&, const Body& body) {
  return body(Types<BFloat16, float>{});
}

#elif defined(FA_TESTED_16_BIT_TYPE)  // in tests/cpp, which calls it with float32 and one 16-bit type

template <class Params>
const Kernels* other_kernels(const Params&) {
  return nullptr;
}

template <class Params, class Body>
auto for_types_of(const Params& p, const Body& body) {
  // No test passes another dtype.
  if (p.dtype == DType::kFloat32) return body(Types<float, float>{});
  return body(Types<FA_TESTED_16_BIT_TYPE, float>{});
}

#else

template <class Params>
const Kernels* other_kernels(const Params&) {
  return nullptr;
}

template <class Params, class Body>
auto for_types_of(const Params& p, const Body& body) {
  switch (p.dtype) {
    case DType::kFloat64: return body(Types<double, double>{});
    case DType::kBFloat16: return body(Types<BFloat16, float>{});
    case DType::kFloat16: return body(Types<Float16, float>{});
    case DType::kFloat32:
    case DType::kBool: break;  // kBool is not a type of q: checked in ops/checks/check_tensors.cpp
  }
  return body(Types<float, float>{});
}

#endif

// Defines run_NAME and run_NAME_workspace, which call the templates NAME and NAME_workspace for the types of a call, and
// NAME_pass, which holds both. The third argument: the arguments of the templates.
#define FA_PASS_FOR(name, Params, ...)                                                   \
  size_t run_##name##_workspace(const Params& p, int threads) {                          \
    if (const Kernels* k = other_kernels(p)) return k->name.workspace(p, threads);       \
    return for_types_of(p, [&](auto types) {                                             \
      using Of = decltype(types);                                                        \
      return name##_workspace<__VA_ARGS__>(p, threads);                                  \
    });                                                                                  \
  }                                                                                      \
  void run_##name(const Params& p, void* workspace, const Parallel& parallel) {          \
    if (const Kernels* k = other_kernels(p)) return k->name.run(p, workspace, parallel); \
    calls.fetch_add(1, std::memory_order_relaxed);                                       \
    for_types_of(p, [&](auto types) {                                                    \
      using Of = decltype(types);                                                        \
      name<__VA_ARGS__>(p, workspace, parallel);                                         \
    });                                                                                  \
  }                                                                                      \
  constexpr Pass<Params> name##_pass = {run_##name##_workspace, run_##name};
#define FA_PASS(name, Params) FA_PASS_FOR(name, Params, typename Of::Operand, typename Of::T)

FA_PASS(forward, AttentionParams)
FA_PASS(backward, BackwardParams)
FA_PASS(jvp, JvpParams)
FA_PASS(double_backward, DoubleBackwardParams)

#if defined(FA_TESTED_PASSES_ONLY)  // tests/cpp runs the passes above, and compiles no other pass
#undef FA_PASS_FOR
#define FA_PASS_FOR(name, Params, ...) constexpr Pass<Params> name##_pass = {nullptr, nullptr};
#endif
FA_PASS(weights, WeightsParams)
FA_PASS_FOR(indexer_topk, IndexerTopkParams, typename Of::In, typename Of::T)

// Passes of the indexer. They widen 16-bit operands on every instruction set, and choose the type of the operands while
// they load them (for_row_type). So these passes are compiled once for each type of accumulators.
#if defined(FA_OTHER_DTYPES) && !defined(FA_TESTED_PASSES_ONLY)
#define FA_WIDENED_PASS(name, Params)                                           \
  size_t run_##name##_workspace(const Params& p, int threads) {                 \
    return FA_OTHER_DTYPES->name.workspace(p, threads);                         \
  }                                                                             \
  void run_##name(const Params& p, void* workspace, const Parallel& parallel) { \
    FA_OTHER_DTYPES->name.run(p, workspace, parallel);                          \
  }                                                                             \
  constexpr Pass<Params> name##_pass = {run_##name##_workspace, run_##name};
#else
#define FA_WIDENED_PASS(name, Params) FA_PASS_FOR(name, Params, typename Of::T)
#endif
FA_WIDENED_PASS(indexer_scores, IndexerScoresParams)
FA_WIDENED_PASS(indexer_scores_backward, IndexerScoresBackwardParams)
FA_WIDENED_PASS(indexer_loss, IndexerLossParams)
FA_WIDENED_PASS(indexer_loss_backward, IndexerLossBackwardParams)
#undef FA_WIDENED_PASS

FA_PASS(indexed, IndexedParams)
FA_PASS(indexed_backward, IndexedBackwardParams)
#undef FA_PASS
#undef FA_PASS_FOR

int64_t decode_splits(const AttentionParams& p) { return is_decode(p) ? split_keys_of(p).splits : 0; }

void run_append(const AppendParams& p, const Parallel& parallel) {
  if (const Kernels* k = other_kernels(p)) return k->append(p, parallel);
  for_types_of(p, [&](auto types) {
    using Of = decltype(types);
    append<typename Of::In, typename Of::T>(p, parallel);
  });
}

constexpr TileFunctions kTileFunctions = {
    load_bias_tile<float>, add_keys<float>, add_in_place<float>, load_dropout_tile<float>,
    [](Operation operation, const void* step) {
      execute_arithmetic<float>(operation, *static_cast<const ProgramStep<float>*>(step));
    }};

#if defined(FA_HAS_FUNCTIONS_FOR_AMX)
constexpr FewRowFunctions kFewRows = {
    [](const AttentionParams& p, const void* key_splits, const void* scratch, const void* task,
       const void* results) {
      decode_task<BFloat16, float>(p, *static_cast<const DecodeSplits*>(key_splits),
                                   *static_cast<const DecodeScratch<BFloat16, float>*>(scratch),
                                   *static_cast<const DecodeTask*>(task),
                                   *static_cast<const SplitResults<float>*>(results));
    },
    [](const void* many, const AttentionParams& p, int64_t n, const void* from, int64_t ldq, int64_t rows) {
      static_cast<const ManyRows<BFloat16, float>*>(many)->load_lane_queries(
          p, n, static_cast<const Pair*>(from), ldq, rows);
    },
    [](const void* many, int64_t n, int64_t rows, const void* keys, int64_t j, int64_t count, float scale,
       const void* to, void* ahead) {
      static_cast<const ManyRows<BFloat16, float>*>(many)->load_lane_scores(
          n, rows, *static_cast<const Rows<BFloat16>*>(keys), j, count, scale,
          *static_cast<const LaneTile<float>*>(to), *static_cast<Prefetcher*>(ahead));
    },
    [](const void* many, const void* probs, int64_t rows, const void* values, int64_t count, float* out,
       int64_t ldo, void* ahead) {
      static_cast<const ManyRows<BFloat16, float>*>(many)->add_lane_values(
          *static_cast<const AllProbs<float>*>(probs), rows, static_cast<const Rows<BFloat16>*>(values),
          count, out, ldo, *static_cast<Prefetcher*>(ahead));
    }};
constexpr const FewRowFunctions* few_rows = &kFewRows;
#else
constexpr const FewRowFunctions* few_rows = nullptr;
#endif

constexpr Kernels kKernels = {FA_ISA_NAME,
                              &calls,
                              forward_pass,
                              backward_pass,
                              jvp_pass,
                              double_backward_pass,
                              weights_pass,
                              indexed_pass,
                              indexed_backward_pass,
                              decode_splits,
                              kDecodeMaxQueries,
                              run_append,
                              indexer_topk_pass,
                              indexer_scores_pass,
                              indexer_scores_backward_pass,
                              indexer_loss_pass,
                              indexer_loss_backward_pass,
                              &kTileFunctions,
                              few_rows};
