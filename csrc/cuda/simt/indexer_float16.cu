#include "indexer_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t indexer_scores_float16(const IndexerScoresParams& p, void*, cudaStream_t stream) {
  return launch_indexer_scores<__half>(p, stream);
}

cudaError_t indexer_scores_backward_float16(const IndexerScoresBackwardParams& p, void* workspace,
                                            cudaStream_t stream) {
  return launch_indexer_scores_backward<__half>(p, workspace, stream);
}

cudaError_t indexer_loss_float16(const IndexerLossParams& p, void*, cudaStream_t stream) {
  return launch_indexer_loss<__half>(p, stream);
}

cudaError_t indexer_loss_backward_float16(const IndexerLossBackwardParams& p, void* workspace,
                                          cudaStream_t stream) {
  return launch_indexer_loss_backward<__half>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
