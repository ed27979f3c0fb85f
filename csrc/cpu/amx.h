// AMX instructions for bfloat16, with the names of kernels/tile_gemm-inl.h. The compilers' intrinsics accept a
// register number only as a literal, not from a template.
#pragma once

#define FA_TILE_CONFIGURE(config) asm volatile("ldtilecfg %0" ::"m"(config) : "memory")
#define FA_TILE_RELEASE() asm volatile("tilerelease" ::: "memory")
#define FA_TILE_ZERO(n) asm volatile("tilezero %%tmm%c0" ::"i"(n))
// Loads 16 rows of 64 bytes; the distance of rows is `bytes`.
#define FA_TILE_LOAD(n, from, bytes) \
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(n), "r"(from), "r"(int64_t(bytes)) : "memory")
#define FA_TILE_STORE(n, to, bytes) \
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(n), "r"(to), "r"(int64_t(bytes)) : "memory")
// Tile c += tile a * tile b.
#define FA_TILE_DOT_BFLOAT16(c, a, b) \
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b))
// Register 5 += register 6 * register 7. kernels/tile_gemm-inl.h stores no values in these registers between products.
#define FA_TILE_KEEP_AWAKE() FA_TILE_DOT_BFLOAT16(5, 6, 7)
