// Chooses the CUDA tier that runs a call. All calls use these functions, so there is no silent fallback.
#pragma once

#include "../core/indexed.h"
#include "../core/indexer.h"
#include "run.h"

namespace flash_attn_ext::cuda {

Selection<AttentionParams> select_forward(const AttentionParams& params);
Selection<BackwardParams> select_backward(const BackwardParams& params);
Selection<JvpParams> select_jvp(const JvpParams& params);
Selection<DoubleBackwardParams> select_double_backward(const DoubleBackwardParams& params);
Selection<WeightsParams> select_weights(const WeightsParams& params);
Selection<IndexedParams> select_indexed(const IndexedParams& params);
Selection<IndexedBackwardParams> select_indexed_backward(const IndexedBackwardParams& params);
Selection<IndexerScoresParams> select_indexer_scores(const IndexerScoresParams& params);
Selection<IndexerScoresBackwardParams> select_indexer_scores_backward(
    const IndexerScoresBackwardParams& params);
Selection<IndexerLossParams> select_indexer_loss(const IndexerLossParams& params);
Selection<IndexerLossBackwardParams> select_indexer_loss_backward(const IndexerLossBackwardParams& params);

}  // namespace flash_attn_ext::cuda
