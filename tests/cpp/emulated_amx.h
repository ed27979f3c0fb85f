// The tile registers of AMX in memory, in place of csrc/cpu/amx.h: kernels of isa_amx.cpp run on any CPU with AVX-512
// BF16. An operation that faults on a CPU ends the program.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace test::amx {

void configure(const void* config);
void release();
void zero(int tile);
void load(int tile, const void* from, size_t stride);
void store(int tile, void* to, size_t stride);
void dot_bfloat16(int c, int a, int b);
void keep_awake();  // checks that this thread has configured the registers

// Number of instructions that all threads have run.
struct Counts {
  int64_t configurations, products, loads, stores;
};
Counts counts();

// An error of the emulation, to prove that tests see it: "tile pairs", "tile stride", "tile configuration", "tile
// release", or none.
extern std::string broken;

}  // namespace test::amx

#define FA_TILE_CONFIGURE(config) test::amx::configure(&(config))
#define FA_TILE_RELEASE() test::amx::release()
#define FA_TILE_ZERO(n) test::amx::zero(n)
#define FA_TILE_LOAD(n, from, bytes) test::amx::load(n, from, bytes)
#define FA_TILE_STORE(n, to, bytes) test::amx::store(n, to, bytes)
#define FA_TILE_DOT_BFLOAT16(c, a, b) test::amx::dot_bfloat16(c, a, b)
#define FA_TILE_KEEP_AWAKE() test::amx::keep_awake()
