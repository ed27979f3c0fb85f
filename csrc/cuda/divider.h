// Division by a number that is constant in a launch: a multiplication and a shift. GPUs have no instruction for
// division.
#pragma once

#include <cstdint>

#include "../core/host_device.h"

namespace flash_attn_ext::cuda {

// Divides numbers below 2^31. Granlund and Montgomery, "Division by invariant integers using multiplication" (1994),
// figure 4.1; its sum stays below 2^32 here.
struct Divider {
  uint32_t divisor = 1, multiplier = 1, shift = 0;

  Divider() = default;
  explicit Divider(int64_t by) : divisor(static_cast<uint32_t>(by)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - divisor) << 32) / divisor + 1);
  }
  FA_HOST_DEVICE int quotient(int n) const {
    const auto high = static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> 32);
    return static_cast<int>((high + static_cast<uint32_t>(n)) >> shift);
  }
  FA_HOST_DEVICE int remainder(int n) const { return n - quotient(n) * static_cast<int>(divisor); }
};

}  // namespace flash_attn_ext::cuda
