// The names of the CUDA tiers, and the tier that FLASH_ATTN_EXT_CUDA_TIER or force_tier() forces. A build without CUDA
// kernels has this file, too. There, a forced tier is an error.
#pragma once

#include <string>

namespace flash_attn_ext::cuda {

// The only tier that may run, or null: the selector chooses. Throws std::invalid_argument if FLASH_ATTN_EXT_CUDA_TIER
// names a tier that is unknown or not in this build.
const char* forced_tier();

// Forces `name` for the process; an empty name returns to the environment's choice. Throws std::invalid_argument, and
// changes nothing, if the tier is unknown or not in this build.
void force_tier(const std::string& name);

}  // namespace flash_attn_ext::cuda
