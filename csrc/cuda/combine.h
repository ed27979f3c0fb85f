// Flash-Decoding's second step: merges the results of a forward that has split the keys over blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../core/params.h"

namespace flash_attn_ext::cuda {

// The results of the splits, for launch_combine(). T is the type of the accumulators.
template <class T>
struct Partials {
  T* out;      // [splits][lse_size()][D_v], not divided by the sum
  T* row_max;  // [splits][lse_size()]
  T* row_sum;  // the same

  Partials(void* workspace, const AttentionParams& p, int64_t splits) {
    const int64_t rows = p.lse_size();
    out = static_cast<T*>(workspace);
    row_max = out + splits * rows * p.sizes.head_dim_v;
    row_sum = row_max + splits * rows;
  }
  // Returns the out of one split, in the form of p.out.
  FA_HOST_DEVICE Tensor4 out_of_split(const AttentionParams& p, int64_t split) const {
    const int64_t first = p.lse_index(0, 0, 0), columns = p.sizes.head_dim_v;
    return {out + (split * p.lse_size() + first) * columns, (p.lse_index(1, 0, 0) - first) * columns,
            (p.lse_index(0, 1, 0) - first) * columns, columns};
  }
  static int64_t elements(const AttentionParams& p, int64_t splits) {
    return splits * p.lse_size() * (p.sizes.head_dim_v + 2);
  }
};

// Merges the splits into p.out and p.lse. Does nothing for one split, because its block has written both.
cudaError_t launch_combine(const AttentionParams& p, int64_t splits, void* workspace, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda
