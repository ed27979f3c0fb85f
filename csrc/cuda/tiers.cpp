#include "tiers.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace flash_attn_ext::cuda {
namespace {

constexpr const char* kTiers[] = {"simt", "sm75", "sm80", "sm90"};  // slowest first

#if defined(FLASH_ATTN_EXT_WITH_CUDA) || defined(FLASH_ATTN_EXT_CUDA_ON_HOST)
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

const char* find_tier(const std::string& name, const std::string& source) {
  for (const char* tier : kTiers) {
    if (name != tier) continue;
    if (kHasCuda) return tier;
    throw std::invalid_argument(source + ": got '" + name + "', but this build has no CUDA half");
  }
  std::string names;
  for (const char* tier : kTiers) names += (names.empty() ? "" : ", ") + std::string(tier);
  throw std::invalid_argument(source + ": got '" + name + "'; allowed: " + names);
}

const char* from_environment() {
  constexpr const char* kVariable = "FLASH_ATTN_EXT_CUDA_TIER";
  const char* name = std::getenv(kVariable);
  return name && *name ? find_tier(name, kVariable) : nullptr;
}

// The environment is read once, at import.
std::atomic<const char*>& forced() {
  static std::atomic<const char*> tier{from_environment()};
  return tier;
}

}  // namespace

const char* forced_tier() { return forced().load(std::memory_order_acquire); }

void force_tier(const std::string& name) {
  const char* tier = name.empty() ? from_environment() : find_tier(name, "tier");
  forced().store(tier, std::memory_order_release);
}

}  // namespace flash_attn_ext::cuda
