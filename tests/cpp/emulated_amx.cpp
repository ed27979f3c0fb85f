#include "emulated_amx.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/amx_permission.h"

#if defined(__x86_64__)
#define FA_WIDE __attribute__((target("avx512f")))  // its callers run on a CPU with AVX-512 only
#else
#define FA_WIDE
#endif

#if !defined(FA_AMX_ON_HARDWARE)  // otherwise csrc/cpu/amx_permission.cpp defines it
namespace flash_attn_ext::cpu {
bool may_use_amx() { return true; }
}  // namespace flash_attn_ext::cpu
#endif

namespace test::amx {

std::string broken;

namespace {

constexpr int kRegisters = 8, kRows = 16, kBytes = 64,
              kNames = 16;  // palette 1; a configuration has 16 entries

typedef float Row __attribute__((vector_size(kBytes)));
typedef uint32_t Words __attribute__((vector_size(kBytes)));

[[noreturn]] void fail(const char* what) {
  std::printf("FAIL emulated AMX: %s\n", what);
  std::abort();
}

struct Registers {
  bool configured = false;
  Words tile[kRegisters][kRows];

  Words* at(int n) {
    if (!configured) fail("a tile instruction without a configuration");
    return tile[n];
  }
  ~Registers() {
    if (configured) fail("a thread ends with its tile registers in use");
  }
};
thread_local Registers registers;

std::atomic<int64_t> configurations{0}, products{0}, loads{0}, stores{0};

// Replaces subnormal numbers by 0, as the CPU does when it reads and writes.
Row flushed(Row x) {
  const Words bits = (Words)x;
  return (Row)((bits & 0x7fffffffu) < 0x00800000u ? bits & 0x80000000u : bits);
}

// Returns the bfloat16 numbers at even and at odd positions of 32, as float.
Row even_of(Words pairs) { return flushed((Row)(pairs << 16)); }
Row odd_of(Words pairs) { return flushed((Row)(pairs & 0xffff0000u)); }

}  // namespace

Counts counts() { return {configurations, products, loads, stores}; }

void configure(const void* config) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[kNames];
    uint8_t rows[kNames];
  } c;
  static_assert(sizeof(c) == kBytes);
  std::memcpy(&c, config, sizeof(c));
  if (c.palette != 1 || c.start_row != 0) fail("not palette 1 from row 0");
  for (const uint8_t byte : c.reserved)
    if (byte != 0) fail("a reserved byte is set");
  for (int n = 0; n < kNames; ++n) {
    const bool exists = n < kRegisters;
    if (c.rows[n] != (exists ? kRows : 0) || c.row_bytes[n] != (exists ? kBytes : 0))
      fail("a register is not configured as a whole tile");
  }
  if (registers.configured) fail("configured twice");
  if (broken == "tile configuration") return;
  ++configurations;
  registers.configured = true;
  std::memset(registers.tile, 0xff,
              sizeof(registers.tile));  // NaN, although a CPU has 0: no kernel may rely on it
}

void release() {
  registers.at(0);
  if (broken != "tile release") registers.configured = false;
}

void keep_awake() { registers.at(0); }

void zero(int tile) { std::memset(registers.at(tile), 0, kRows * kBytes); }

void load(int tile, const void* from, size_t stride) {
  ++loads;
  if (broken == "tile stride") stride = kBytes;
  Words* to = registers.at(tile);
  for (int r = 0; r < kRows; ++r) std::memcpy(to + r, static_cast<const char*>(from) + r * stride, kBytes);
}

void store(int tile, void* to, size_t stride) {
  ++stores;
  const Words* from = registers.at(tile);
  for (int r = 0; r < kRows; ++r) std::memcpy(static_cast<char*>(to) + r * stride, from + r, kBytes);
}

// Intel's Software Developer's Manual, volume 2, TDPBF16PS. The product of two bfloat16 numbers is exact in float, so
// multiplication and addition round like the CPU's multiply-add. amx_hardware.cpp
// compares the results with a CPU. The right operand is widened once for all rows.
FA_WIDE void dot_bfloat16(int c, int a, int b) {
  ++products;
  if (c == a || c == b || a == b) fail("two operands of a product in one register");
  Row* sums = reinterpret_cast<Row*>(registers.at(c));
  const Words *left = registers.at(a), *right = registers.at(b);
  const bool swapped = broken == "tile pairs";
  Row right_even[kBytes / 4], right_odd[kBytes / 4];
  for (int k = 0; k < kBytes / 4; ++k) {
    right_even[k] = swapped ? odd_of(right[k]) : even_of(right[k]);
    right_odd[k] = swapped ? even_of(right[k]) : odd_of(right[k]);
  }
  for (int m = 0; m < kRows; ++m) {
    const Row left_even = even_of(left[m]), left_odd = odd_of(left[m]);
    Row even = {}, odd = {};
    for (int k = 0; k < kBytes / 4; ++k) {
      even = flushed(even + left_even[k] * right_even[k]);
      odd = flushed(odd + left_odd[k] * right_odd[k]);
    }
    sums[m] = flushed(flushed(sums[m]) + flushed(even + odd));
  }
}

}  // namespace test::amx
