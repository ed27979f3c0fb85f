// Backward with a function on scores: the kernels of flex_backward.cuh with other steps between the products.
//
// The gradients of captured tensors need two passes (../simt/captured.cuh). The first pass also computes dq, dk and dv.
// The second pass is the main kernel without these results.
#pragma once

#include "../accumulators.cuh"
#include "../simt/captured.cuh"
#include "../simt/functions.h"
#include "flex_backward.cuh"

namespace flash_attn_ext::cuda::sm90 {

// P and dS of an element.
struct ScoreGradient {
  float prob, dscore;
};

struct ScoreGradients : ScoredByFunctions {
  simt::RowTerms<float> terms;

  // `at`: the score before the function. `row`: of the terms. kAdds: adds to the gradients of captured elements. Both
  // results are 0 for an element that the function hides.
  template <bool kAdds>
  __device__ ScoreGradient gradient(simt::ProgramPoint<float> at, int64_t row, float dprob,
                                    bool& attends) const {
    const float score = new_score(at);
    attends = score != -kInf<float>;
    if (!attends) return {0, 0};
    constexpr float kScale = static_cast<float>(kLog2E);
    // First the difference, because it is exact for large scores.
    const float exponent = fmaf(score - terms.reference[row], kScale, -(terms.correction[row] * kScale));
    const float prob = ptx::exp2_fast(exponent);
    at.gradient = prob * (dprob - terms.delta[row]);
    return {prob, simt::old_gradient<kAdds>(functions, at)};
  }
};

struct ScoreBackwardArguments : FlexBackwardArguments {
  simt::RowTerms<float> terms;

  FA_HOST_DEVICE ScoreGradients hidden() const { return {{{functions}}, terms}; }

  // Waits for dP, and replaces products by P^T, and dP^T by dS^T. `key`: the thread's first key. No product may
  // run during the function: ptxas would serialise all products.
  template <int kElements>
  __device__ void finish_scores(const BackwardRange& range, const ListedTileCursor& tile, int key,
                                int first_row, const SeenElements& elements, float (&s)[kElements],
                                float (&ds)[kElements]) const {
    ptx::wgmma_wait<0>(ds);  // dP is complete, and no product runs
    const int row = first_row + first_column_in_eight();
    const int64_t first_term = p.lse_index(range.b, tile.head, range.q_row);
    for_each_accumulator(
        as_accumulators(s), as_accumulators(ds), [&](int n, float (&scores)[4], float (&gradients)[4]) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float product = scores[e], dprob = gradients[e];
            scores[e] = gradients[e] = 0;
            if (!(elements.seen[e / 2] >> (2 * n + e % 2) & 1)) continue;
            const float x = has_softcap(p) ? score.tanh(product) : product;
            const int i = row + 8 * n + e % 2;
            bool attends;
            const ScoreGradient gradient = hidden().template gradient<true>(
                {range.b, tile.head, i, key + e / 2 * 8, x * score.scale, 0}, first_term + i, dprob, attends);
            scores[e] = gradient.prob;
            gradients[e] = has_softcap(p) ? gradient.dscore * fmaf(-x, x, 1.0f) : gradient.dscore;
          }
        });
  }
};

// Its tasks are not sorted: the loop at a head dimension of 256 would have 1233 instructions, not 1189.
template <class In, int kHeadDim>
struct ScoreBackward : FlexBackward<In, kHeadDim> {
  using Arguments = ScoreBackwardArguments;
  static constexpr bool kScores = true;
};

template <class In, int kHeadDim>
cudaError_t launch_score_backward_tiles(const BackwardParams& p, void* workspace, cudaStream_t stream,
                                        simt::FlexBackwardStep* row_terms) {
  using Config = ScoreBackward<In, kHeadDim>;
  Arena arena(workspace);
  const auto w = FlexBackwardWorkspace::lay_out(arena, p);
  ScoreBackwardArguments a{{backward_arguments(p, w.others), w.lists, w.turns, w.functions}, w.simt.rows};
  const int64_t captured = p.functions->captured_count;
  const auto captured_pass = [&] {
    simt::CapturedSums adds = w.simt.captured;
    adds.pass = simt::CapturedSums::kAdd;
    ScoreBackwardArguments second = a;  // with the tensor maps
    second.p.dq = second.p.dk = second.p.dv = {};
    second.p.deterministic = false;
    return in_order([&] { return simt::launch_store_functions(p, w.functions, stream, adds); },
                    [&] { return launch_keys_kernel<In, Config>(second, stream); },
                    [&] { return simt::launch_store_captured<float>(adds, *p.functions, stream); });
  };
  return in_order([&] { return row_terms(p, w.simt, stream); },  // stores the functions, too
                  [&] {
                    return w.simt.captured ? simt::launch_clear_captured(w.simt.captured, captured, stream)
                                           : cudaSuccess;
                  },
                  [&] { return launch_listed<In, Config>(p, w, a, stream, [] { return cudaSuccess; }); },
                  [&] { return w.simt.captured ? captured_pass() : cudaSuccess; });
}

// Two kernels. The head dimension 64 is padded to 128: the function takes most of the time.
template <class In>
cudaError_t launch_score_backward(const BackwardParams& p, void* workspace, cudaStream_t stream,
                                  simt::FlexBackwardStep* row_terms) {
  return backward_head_dims(p).qk == 128
             ? launch_score_backward_tiles<In, 128>(p, workspace, stream, row_terms)
             : launch_score_backward_tiles<In, 256>(p, workspace, stream, row_terms);
}

}  // namespace flash_attn_ext::cuda::sm90
