// The simt tier: plain CUDA C++ for every dtype, head dimension and option, on any GPU. Torch-free.
#pragma once

#include "../recompute_flags.h"
#include "../run.h"

namespace flash_attn_ext::cuda::simt {

size_t forward_workspace(const AttentionParams& p);
size_t backward_workspace(const BackwardParams& p);

using Forward = cudaError_t(const AttentionParams&, void* workspace, cudaStream_t);
using Backward = cudaError_t(const BackwardParams&, void* workspace, cudaStream_t);

Forward forward_float32, forward_float64, forward_bfloat16, forward_float16;
Backward backward_float32, backward_float64, backward_bfloat16, backward_float16;

// The backward's steps, for the tiers on tensor cores: what each query row needs (plan.h's RowTerms, which
// lie first in the workspace), and then the gradients, of dq, dk and dv the flagged tiles.
using Gradients = cudaError_t(const BackwardParams&, void* workspace, const RecomputeFlags&, cudaStream_t);

Backward row_terms_bfloat16, row_terms_float16;
Gradients gradients_bfloat16, gradients_float16;

}  // namespace flash_attn_ext::cuda::simt
