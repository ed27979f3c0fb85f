#include "amx_permission.h"

#if defined(__x86_64__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace flash_attn_ext::cpu {
namespace {

constexpr unsigned kTileConfigState = 17,
                   kTileDataState = 18;  // bits of XCR0, and numbers of XSAVE components

bool cpu_has_tiles() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  return (edx & kBFloat16) && (edx & kTiles);
}

// Returns whether the operating system saves the tile registers at a thread switch.
bool system_saves_tiles() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kXgetbv = 1u << 27;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & kXgetbv)) return false;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  constexpr unsigned kBoth = 1u << kTileConfigState | 1u << kTileDataState;
  return (eax & kBoth) == kBoth;
}

// Linux reserves memory for the 8 KB of registers in a process that requests it (Documentation/arch/x86/xstate.rst).
bool system_permits_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileDataState) == 0;
}

}  // namespace

bool may_use_amx() {
  static const bool may = cpu_has_tiles() && system_saves_tiles() && system_permits_tiles();
  return may;
}

}  // namespace flash_attn_ext::cpu

#else

namespace flash_attn_ext::cpu {
bool may_use_amx() { return false; }
}  // namespace flash_attn_ext::cpu

#endif
