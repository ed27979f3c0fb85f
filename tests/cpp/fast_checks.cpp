// AddressSanitizer's checks of accesses, which the kernels call (Makefile, CALLS). If the 8-byte words of an access have no
// poisoned byte, the checks here return. Otherwise the check of AddressSanitizer's library decides and reports. Its calls
// alone would pass through the linker's table, and its check of 32 or 64 bytes is a loop.
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" void __asan_get_shadow_mapping(size_t* scale, size_t* offset);

namespace {

// The shadow has one byte for each word of 8 bytes. It is 0 if all bytes of the word may be accessed.
constexpr size_t kScale = 3;

struct Shadow {
  Shadow() {
    size_t scale;
    __asan_get_shadow_mapping(&scale, &offset);
    if (scale != kScale) __builtin_trap();
  }
  size_t offset;
};

// Initialised before other objects, because their constructors may call the checks.
const Shadow kShadow __attribute__((init_priority(101)));

// Returns whether all bytes may be accessed in 8 * sizeof(Bytes) bytes from the word of an address.
template <class Bytes>
bool may_access(uintptr_t address) {
  Bytes shadow;
  std::memcpy(&shadow, reinterpret_cast<const void*>((address >> kScale) + kShadow.offset), sizeof shadow);
  return shadow == 0;
}

bool may_access(uintptr_t address, size_t bytes) {
  const bool last = may_access<uint8_t>(address + bytes - 1);
  if (bytes == 32) return last && may_access<uint32_t>(address);
  if (bytes == 64) return last && may_access<uint64_t>(address);
  return false;
}

template <class Function>
Function* in_library(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

// The library's check is called by a jump, so its report names the kernel as the caller.
#define FA_CHECK(name, Bytes)                                      \
  extern "C" void name(uintptr_t address) {                        \
    if (may_access<Bytes>(address)) return;                        \
    static auto* const check = in_library<void(uintptr_t)>(#name); \
    check(address);                                                \
  }
#define FA_CHECK_OF_ANY_SIZE(name)                                         \
  extern "C" void name(uintptr_t address, size_t bytes) {                  \
    if (may_access(address, bytes)) return;                                \
    static auto* const check = in_library<void(uintptr_t, size_t)>(#name); \
    check(address, bytes);                                                 \
  }

FA_CHECK(__asan_load1, uint8_t)
FA_CHECK(__asan_load2, uint8_t)
FA_CHECK(__asan_load4, uint8_t)
FA_CHECK(__asan_load8, uint8_t)
FA_CHECK(__asan_load16, uint16_t)
FA_CHECK(__asan_store1, uint8_t)
FA_CHECK(__asan_store2, uint8_t)
FA_CHECK(__asan_store4, uint8_t)
FA_CHECK(__asan_store8, uint8_t)
FA_CHECK(__asan_store16, uint16_t)
FA_CHECK_OF_ANY_SIZE(__asan_loadN)
FA_CHECK_OF_ANY_SIZE(__asan_storeN)
