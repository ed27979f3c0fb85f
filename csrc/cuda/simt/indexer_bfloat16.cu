#include "indexer_backward.cuh"

namespace flash_attn_ext::cuda::simt {

cudaError_t indexer_scores_bfloat16(const IndexerScoresParams& p, void*, cudaStream_t stream) {
  return launch_indexer_scores<__nv_bfloat16>(p, stream);
}

cudaError_t indexer_scores_backward_bfloat16(const IndexerScoresBackwardParams& p, void* workspace,
                                             cudaStream_t stream) {
  return launch_indexer_scores_backward<__nv_bfloat16>(p, workspace, stream);
}

cudaError_t indexer_loss_bfloat16(const IndexerLossParams& p, void*, cudaStream_t stream) {
  return launch_indexer_loss<__nv_bfloat16>(p, stream);
}

cudaError_t indexer_loss_backward_bfloat16(const IndexerLossBackwardParams& p, void* workspace,
                                           cudaStream_t stream) {
  return launch_indexer_loss_backward<__nv_bfloat16>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::simt
