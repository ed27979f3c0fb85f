// Packed sequences of different lengths: what one of them is to a kernel.
#pragma once

#include <type_traits>

#include "../core/params.h"

namespace flash_attn_ext::cuda {

// Leaves out the first `rows` rows. A gradient that is not wanted stays null.
template <class In>
__device__ void skip_rows(Tensor4& t, int64_t rows) {
  if (t) t.data = t.row<In>(0, 0, rows);
}

// The call as sequence b sees it: its own lengths and diagonal, tensors from its own first row on. Without
// VarlenParams, the call itself.
template <class In, class Params>
__device__ Params of_sequence(Params p, int64_t b) {
  if (!p.varlen) return p;
  const int64_t first_q = p.varlen.cu_seqlens_q[b], first_k = p.varlen.cu_seqlens_k[b];
  p.sizes.seqlen_q = p.varlen.cu_seqlens_q[b + 1] - first_q;
  p.sizes.seqlen_k = p.varlen.cu_seqlens_k[b + 1] - first_k;
  if (p.varlen.lower_right) p.band.diagonal = p.sizes.seqlen_k - p.sizes.seqlen_q;
  skip_rows<In>(p.q, first_q);
  skip_rows<In>(p.out, first_q);
  skip_rows<In>(p.k, first_k);
  skip_rows<In>(p.v, first_k);
  if constexpr (std::is_same_v<Params, BackwardParams>) {
    skip_rows<In>(p.dout, first_q);
    skip_rows<In>(p.dq, first_q);
    skip_rows<In>(p.dk, first_k);
    skip_rows<In>(p.dv, first_k);
  }
  return p;
}

}  // namespace flash_attn_ext::cuda
