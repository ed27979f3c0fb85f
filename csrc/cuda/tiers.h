// The CUDA tiers' names, and the one that is forced: FLASH_ATTN_EXT_CUDA_TIER or force_tier(). Compiled
// without a CUDA half too, so that a name that cannot run is an error there and is never ignored.
#pragma once

#include <string>

namespace flash_attn_ext::cuda {

// The only tier that may run, or null: the selector chooses. Throws std::invalid_argument if
// FLASH_ATTN_EXT_CUDA_TIER names a tier that is unknown or that this build lacks.
const char* forced_tier();

// Pins `name` for the process, or returns to what the environment says if it is empty. Throws
// std::invalid_argument if it is unknown or if this build lacks it; nothing changes then.
void force_tier(const std::string& name);

}  // namespace flash_attn_ext::cuda
