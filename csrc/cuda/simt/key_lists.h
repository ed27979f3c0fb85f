// The keys of each query row as sorted lists without duplicates, in device memory: attention by index.
#pragma once

#include <cuda_runtime_api.h>

#include "../../core/arena.h"
#include "../../core/indexed.h"
#include "schedule.h"

namespace flash_attn_ext::cuda::simt {

// Lists of all rows: the numbers of keys, or of blocks of keys.
struct KeyLists {
  KeyIndices indices;
  int32_t* entries;  // in the shape of the indices
  int32_t* lengths;  // the length of each row's list
  int64_t rows;      // rows of all lists
  int64_t limit;     // numbers from here on are no keys

  static KeyLists lay_out(Arena& arena, const Sizes& z, const KeyIndices& indices) {
    KeyLists lists{indices, nullptr, nullptr, 0, ceil_div(z.seqlen_k, indices.block_size)};
    lists.rows = (indices.stride_b ? z.batch : 1) * (indices.stride_h ? z.heads_kv : 1) * z.seqlen_q;
    lists.entries = arena.take<int32_t>(indices.count == 0 ? 0 : lists.rows * indices.count);
    lists.lengths = arena.take<int32_t>(indices.count == 0 ? 0 : lists.rows);
    return lists;
  }
};

template <class T>
struct IndexedBackwardWorkspace : BackwardWorkspace<T> {
  KeyLists lists;

  static IndexedBackwardWorkspace lay_out(Arena& arena, const IndexedBackwardParams& p) {
    const int64_t rows = p.lse_size();
    // A part of dslopes for each row of lse.
    return {{RowTerms<T>::lay_out(arena, p), arena.take<T>(p.dalibi_slopes ? rows : 0), nullptr},
            KeyLists::lay_out(arena, p.sizes, p.indices)};
  }
};

// Sorts and removes duplicates. Ignores negative numbers and numbers beyond the keys.
cudaError_t launch_sort(const KeyLists& lists, cudaStream_t stream);

}  // namespace flash_attn_ext::cuda::simt
