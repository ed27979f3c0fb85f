#include "indexer_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t indexer_scores_float32(const IndexerScoresParams& p, void*, cudaStream_t stream) {
  return launch_indexer_scores<float>(p, stream);
}

cudaError_t indexer_scores_backward_float32(const IndexerScoresBackwardParams& p, void* workspace,
                                            cudaStream_t stream) {
  return launch_indexer_scores_backward<float>(p, workspace, stream);
}

cudaError_t indexer_loss_float32(const IndexerLossParams& p, void*, cudaStream_t stream) {
  return launch_indexer_loss<float>(p, stream);
}

cudaError_t indexer_loss_backward_float32(const IndexerLossBackwardParams& p, void* workspace,
                                          cudaStream_t stream) {
  return launch_indexer_loss_backward<float>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
