#include "indexer_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t indexer_scores_float64(const IndexerScoresParams& p, void*, cudaStream_t stream) {
  return launch_indexer_scores<double>(p, stream);
}

cudaError_t indexer_scores_backward_float64(const IndexerScoresBackwardParams& p, void* workspace,
                                            cudaStream_t stream) {
  return launch_indexer_scores_backward<double>(p, workspace, stream);
}

cudaError_t indexer_loss_float64(const IndexerLossParams& p, void*, cudaStream_t stream) {
  return launch_indexer_loss<double>(p, stream);
}

cudaError_t indexer_loss_backward_float64(const IndexerLossBackwardParams& p, void* workspace,
                                          cudaStream_t stream) {
  return launch_indexer_loss_backward<double>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
