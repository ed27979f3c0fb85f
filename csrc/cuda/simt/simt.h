// The simt tier: CUDA C++ without tensor cores, for every dtype and head dimension, on any GPU. Without torch.
#pragma once

#include "../../core/indexed.h"
#include "../../core/indexer.h"
#include "../run.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::simt {

size_t forward_workspace(const AttentionParams& p);
size_t backward_workspace(const BackwardParams& p);
size_t double_backward_workspace(const DoubleBackwardParams& p);
size_t weights_workspace(const WeightsParams& p);
size_t indexed_workspace(const IndexedParams& p);
size_t indexed_backward_workspace(const IndexedBackwardParams& p);
size_t indexer_scores_backward_workspace(const IndexerScoresBackwardParams& p);
size_t indexer_loss_backward_workspace(const IndexerLossBackwardParams& p);

// Why this tier cannot run the forward. Null: it can.
const char* why_not_forward(const AttentionParams& p);
// The same for all passes of the indexer. This tier can run every other call.
const char* why_not_indexer(const IndexerParams& p);

using Forward = Launch<AttentionParams>;
using Backward = Launch<BackwardParams>;
using Jvp = Launch<JvpParams>;
using DoubleBackward = Launch<DoubleBackwardParams>;
using Weights = Launch<WeightsParams>;
using Indexed = Launch<IndexedParams>;
using IndexedBackward = Launch<IndexedBackwardParams>;
using IndexerScores = Launch<IndexerScoresParams>;
using IndexerScoresBackward = Launch<IndexerScoresBackwardParams>;
using IndexerLoss = Launch<IndexerLossParams>;
using IndexerLossBackward = Launch<IndexerLossBackwardParams>;

Forward forward_float32, forward_float64, forward_bfloat16, forward_float16;
Backward backward_float32, backward_float64, backward_bfloat16, backward_float16;
Jvp jvp_float32, jvp_float64, jvp_bfloat16, jvp_float16;
DoubleBackward double_backward_float32, double_backward_float64, double_backward_bfloat16,
    double_backward_float16;
Weights weights_float32, weights_float64, weights_bfloat16, weights_float16;
Indexed indexed_float32, indexed_float64, indexed_bfloat16, indexed_float16;
IndexedBackward indexed_backward_float32, indexed_backward_float64, indexed_backward_bfloat16,
    indexed_backward_float16;
IndexerScores indexer_scores_float32, indexer_scores_float64, indexer_scores_bfloat16, indexer_scores_float16;
IndexerScoresBackward indexer_scores_backward_float32, indexer_scores_backward_float64,
    indexer_scores_backward_bfloat16, indexer_scores_backward_float16;
IndexerLoss indexer_loss_float32, indexer_loss_float64, indexer_loss_bfloat16, indexer_loss_float16;
IndexerLossBackward indexer_loss_backward_float32, indexer_loss_backward_float64,
    indexer_loss_backward_bfloat16, indexer_loss_backward_float16;

// The backward's steps, for the double backward, the weights and the tiers on tensor cores: the terms of each query row,
// then the gradients.
template <class T>
using ComputeRowTerms = cudaError_t(const BackwardParams&, const RowTerms<T>&, cudaStream_t);
using ComputeGradients = cudaError_t(const BackwardParams&, const BackwardWorkspace<float>&, cudaStream_t);

ComputeRowTerms<float> row_terms_float32, row_terms_bfloat16, row_terms_float16;
ComputeRowTerms<double> row_terms_float64;
ComputeGradients gradients_bfloat16, gradients_float16;

}  // namespace flash_attn_ext::cuda::simt
