// What the CPU kernels do not take: null if they take a call, else the reason. The same on every instruction set.
// The CUDA tiers answer the same question (cuda/*/why_not.cpp).
#pragma once

#include "../core/params.h"

namespace flash_attn_ext::cpu {

const char* why_not(const AttentionParams& p);
const char* why_not(const BackwardParams& p);
const char* why_not(const JvpParams& p);
const char* why_not(const DoubleBackwardParams& p);
const char* why_not(const WeightsParams& p);

}  // namespace flash_attn_ext::cpu
