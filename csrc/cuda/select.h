// Which CUDA tier runs a call. One function answers for all of them, so that nothing falls back in silence.
#pragma once

#include "run.h"

namespace flash_attn_ext::cuda {

Selection<AttentionParams> select_forward(const AttentionParams& params);
Selection<BackwardParams> select_backward(const BackwardParams& params);
Selection<JvpParams> select_jvp(const JvpParams& params);
Selection<DoubleBackwardParams> select_double_backward(const DoubleBackwardParams& params);
Selection<WeightsParams> select_weights(const WeightsParams& params);

}  // namespace flash_attn_ext::cuda
