// why_not() returns null if the CPU kernels support a call, otherwise the reason. The answer is the same for every
// instruction set. cuda/*/why_not.cpp have the answers of the CUDA tiers.
#pragma once

#include "../core/int8.h"

namespace flash_attn_ext::cpu {

const char* why_not(const AttentionParams& p);
const char* why_not(const Int8Params& p);
const char* why_not(const BackwardParams& p);
const char* why_not(const JvpParams& p);
const char* why_not(const DoubleBackwardParams& p);
const char* why_not(const WeightsParams& p);

}  // namespace flash_attn_ext::cpu
