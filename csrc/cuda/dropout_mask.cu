// Writes which elements dropout keeps, for tests and dense references.
#include "../core/splits.h"
#include "launch.h"
#include "run.h"
#include "scores.cuh"

namespace flash_attn_ext::cuda {
namespace {

constexpr int kMaskThreads = 256, kElementsPerBlock = 16 * kMaskThreads;

__global__ void __launch_bounds__(kMaskThreads)
    dropout_mask_kernel(const DropoutParams dropout, const Sizes sizes, int64_t first_row, bool* kept) {
  const PhiloxKey key = dropout_key(dropout);
  const int64_t elements = sizes.batch * sizes.heads * sizes.seqlen_q * sizes.seqlen_k;
  const int64_t first = int64_t{blockIdx.x} * kElementsPerBlock, end = first + kElementsPerBlock;
  for (int64_t e = first + threadIdx.x; e < end && e < elements; e += kMaskThreads) {
    const int64_t row = e / sizes.seqlen_k;
    const int64_t b_h = row / sizes.seqlen_q, b = b_h / sizes.heads, h = b_h % sizes.heads;
    kept[e] = dropout_keeps(key, dropout.threshold, dropout.head(b, h, sizes.heads),
                            dropout.row(first_row + row % sizes.seqlen_q), dropout.col(e % sizes.seqlen_k));
  }
}

}  // namespace

cudaError_t launch_dropout_mask(const DropoutParams& dropout, const Sizes& sizes, int64_t first_row,
                                bool* kept, cudaStream_t stream) {
  const int64_t elements = sizes.batch * sizes.heads * sizes.seqlen_q * sizes.seqlen_k;
  const int64_t blocks = ceil_div(elements, kElementsPerBlock);
  return launch(dropout_mask_kernel, {blocks, 1, 1, kMaskThreads}, stream, dropout, sizes, first_row, kept);
}

}  // namespace flash_attn_ext::cuda
