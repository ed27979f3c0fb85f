// Compares the product of the emulation (emulated_amx.cpp) with the CPU's product, bit by bit, for operands of several
// ranges of exponents.
//
//   amx_hardware [BROKEN]   BROKEN: an error of the emulation (emulated_amx.h), which the comparison must report
//
// Exit status: 0 equal, 1 different, 77 this CPU or its system has no AMX.
#include <cstdio>
#include <cstring>
#include <random>

#include "cpu/amx_permission.h"
#include "emulated_amx.h"  // its functions only: cpu/amx.h defines the instructions
#undef FA_TILE_CONFIGURE
#undef FA_TILE_RELEASE
#undef FA_TILE_ZERO
#undef FA_TILE_LOAD
#undef FA_TILE_STORE
#undef FA_TILE_DOT_BFLOAT16

#if defined(__x86_64__) && defined(__linux__)
#include "cpu/amx.h"

namespace {

constexpr int kSide = 16, kRounds = 400;

struct alignas(64) Configuration {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

struct alignas(64) Tile {
  uint32_t words[kSide][kSide];
};

using Random = std::mt19937;

// Random bfloat16 bits with an exponent in [low, high]; 0 is subnormal, 255 is infinity or NaN.
uint32_t bfloat16_bits(Random& random, int low, int high) {
  const uint32_t bits = random();
  return (bits & 0x807f) | static_cast<uint32_t>(low + bits / 65536 % (high - low + 1)) << 7;
}

struct Inputs {
  const char* name;
  int low, high;          // exponents of the operands
  int sum_low, sum_high;  // exponents of the sums; sum_high 0: sums are 0 or subnormal
};

constexpr Inputs kInputs[] = {
    {"near 1", 120, 130, 120, 130},         {"wide", 67, 187, 1, 254},
    {"cancelling", 127, 127, 127, 130},     {"subnormal operands", 0, 1, 120, 130},
    {"subnormal sums", 50, 75, 0, 2},       {"subnormal products", 55, 70, 0, 0},
    {"overflow", 185, 194, 245, 254},       {"infinity and NaN", 250, 255, 250, 255},
    {"few infinities", 127, 255, 127, 255},
};

Tile multiply_on_hardware(const Tile& a, const Tile& b, const Tile& sums) {
  static constexpr Configuration kConfiguration;
  Tile result;
  FA_TILE_CONFIGURE(kConfiguration);
  FA_TILE_LOAD(0, &sums, 64);
  FA_TILE_LOAD(1, &a, 64);
  FA_TILE_LOAD(2, &b, 64);
  FA_TILE_DOT_BFLOAT16(0, 1, 2);
  FA_TILE_STORE(0, &result, 64);
  FA_TILE_RELEASE();
  return result;
}

Tile multiply_in_emulation(const Tile& a, const Tile& b, const Tile& sums) {
  static constexpr Configuration kConfiguration;
  Tile result;
  test::amx::configure(&kConfiguration);
  test::amx::load(0, &sums, 64);
  test::amx::load(1, &a, 64);
  test::amx::load(2, &b, 64);
  test::amx::dot_bfloat16(0, 1, 2);
  test::amx::store(0, &result, 64);
  test::amx::release();
  return result;
}

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// Counts the sums that differ. All NaNs are equal: no kernel depends on the payload of a NaN.
int compare(const Inputs& in) {
  Random random(1);
  int different = 0, payloads = 0;
  long nans = 0, subnormal_sums = 0;
  for (int round = 0; round < kRounds; ++round) {
    Tile a, b, sums;
    for (int r = 0; r < kSide; ++r)
      for (int c = 0; c < kSide; ++c) {
        a.words[r][c] = bfloat16_bits(random, in.low, in.high) | bfloat16_bits(random, in.low, in.high) << 16;
        b.words[r][c] = bfloat16_bits(random, in.low, in.high) | bfloat16_bits(random, in.low, in.high) << 16;
        sums.words[r][c] = bfloat16_bits(random, in.sum_low, in.sum_high) << 16 | (random() & 0xffff);
      }
    const Tile ours = multiply_in_emulation(a, b, sums), cpus = multiply_on_hardware(a, b, sums);
    for (int r = 0; r < kSide; ++r)
      for (int c = 0; c < kSide; ++c) {
        const uint32_t x = ours.words[r][c], y = cpus.words[r][c];
        nans += is_nan(y);
        subnormal_sums += y << 1 && (y << 1) < 0x01000000u;
        if (is_nan(x) && is_nan(y)) {
          payloads += x != y;
        } else if (x != y && ++different <= 3) {
          std::printf("FAIL %s: emulation %08x, CPU %08x\n", in.name, x, y);
        }
      }
  }
  std::printf("%s: %d sums, %d different, %ld NaN (%d with another payload), %ld subnormal\n", in.name,
              kRounds * kSide * kSide, different, nans, payloads, subnormal_sums);
  return different;
}

}  // namespace

int main(int argc, char** argv) {
  if (!flash_attn_ext::cpu::may_use_amx() || !__builtin_cpu_supports("avx512f")) {
    std::printf("this CPU or its system has no AMX\n");
    return 77;
  }
  if (argc > 1) test::amx::broken = argv[1];
  int different = 0;
  for (const Inputs& in : kInputs) different += compare(in);
  return different != 0;
}

#else

int main() {
  std::printf("AMX needs x86-64 and Linux\n");
  return 77;
}

#endif
