// Functions that translated PTX calls: address spaces, accesses, arithmetic without a C++ operator.
// Everything that memory and threads have in common with the host's run of the sources is tests/cuda_host.
#pragma once

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "hopper_block.h"
#include "include/hopper_on_host.h"

namespace ptx {

// The kernels of a translated file; the last entry has no name.
struct Kernel {
  const char* name;
  void (*run)(const unsigned char* params);
  size_t param_bytes;
};
extern const Kernel kernels[];

extern int fault;  // number of the planted fault that is on; 0: none

// The line of the PTX text that runs: reports name it.
void at_line(int line);
[[noreturn]] void fail(int line, const char* what);

// ---- addresses. Generic and global addresses are the host's. A shared address counts from the start of the block's
// window, as on the GPU, where the first 1024 bytes belong to the system on Hopper. The bits from kRankShift on are the
// number of the block in its cluster.

constexpr uint32_t kSharedBase = 1024, kRankShift = 24, kOffset = (1u << kRankShift) - 1;
uint32_t shared_base();

unsigned char* shared_bytes(uint64_t address);
unsigned char* global_bytes(uint64_t address);
unsigned char* generic_bytes(uint64_t address);
inline unsigned char* local_bytes(uint64_t address) { return reinterpret_cast<unsigned char*>(address); }
inline const unsigned char* param_bytes(uint64_t address) {
  return reinterpret_cast<const unsigned char*>(address);
}
uint64_t generic_to_shared(int line, uint64_t address);
uint64_t shared_to_generic(int line, uint64_t address);

// ---- accesses

void touch(int line, const void* address, size_t bytes, bool is_write);

template <class T, int kCount>
struct Vector {
  T x[kCount];
};

template <class T>
T load(int line, const unsigned char* address) {
  touch(line, address, sizeof(T), false);
  T x;
  std::memcpy(&x, address, sizeof(T));
  return x;
}

template <class T>
void store(int line, unsigned char* address, T x) {
  touch(line, address, sizeof(T), true);
  std::memcpy(address, &x, sizeof(T));
}

template <class T>
T param(int line, const unsigned char* params, size_t bytes, const unsigned char* address) {
  if (address < params || address + sizeof(T) > params + bytes) fail(line, "out of bounds of the parameters");
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) fail(line, "misaligned in the parameters");
  T x;
  std::memcpy(&x, address, sizeof(T));
  return x;
}

template <class T>
void store_param(int line, unsigned char* block, size_t bytes, unsigned char* address, T x) {
  if (address < block || address + sizeof(T) > block + bytes)
    fail(line, "out of bounds of a call's parameters");
  std::memcpy(address, &x, sizeof(T));
}

int32_t acquire(int line, unsigned char* address);
float atomic_add(int line, unsigned char* address, float x);
int32_t atomic_add(int line, unsigned char* address, int32_t x);
uint32_t atomic_add(int line, unsigned char* address, uint32_t x);
uint64_t atomic_add(int line, unsigned char* address, uint64_t x);
uint64_t atomic_max(int line, unsigned char* address, uint64_t x);
uint64_t atomic_or(int line, unsigned char* address, uint64_t x);
void release_add(int line, unsigned char* address, int32_t x);
void cp_async(int line, unsigned char* shared, const unsigned char* global, int bytes, uint32_t read);
void ldmatrix(cuda_host::Site site, uint32_t* r, const unsigned char* row, bool transposed);
void stmatrix(cuda_host::Site site, unsigned char* row, const uint32_t* r);

// ---- threads that meet

void meet(cuda_host::Site site, uint32_t barrier, uint32_t threads);  // 0 threads: the block
void meet_warp(cuda_host::Site site, uint32_t mask);
uint32_t ballot(cuda_host::Site site, bool predicate, uint32_t mask);
uint32_t elect(cuda_host::Site site, uint32_t mask);

struct Taken {
  uint32_t value;
  bool inside;
};
Taken shuffle_idx(cuda_host::Site site, uint32_t value, uint32_t b, uint32_t c, uint32_t mask);
Taken shuffle_bfly(cuda_host::Site site, uint32_t value, uint32_t b, uint32_t c, uint32_t mask);
Taken shuffle_up(cuda_host::Site site, uint32_t value, uint32_t b, uint32_t c, uint32_t mask);
Taken shuffle_down(cuda_host::Site site, uint32_t value, uint32_t b, uint32_t c, uint32_t mask);

// ---- Hopper

inline uint64_t* barrier(unsigned char* address) { return reinterpret_cast<uint64_t*>(address); }
uint32_t address_in_cluster(int line, uint32_t address, uint32_t rank);
void arrive_in_cluster(cuda_host::Site site, uint32_t address);
const CUtensorMap* tensor_map(uint64_t address);
uint64_t descriptor(int line, uint64_t of_wgmma);  // with an address as tests/cuda_host counts them
void bulk_add(cuda_host::Site site, unsigned char* sums, const unsigned char* terms, uint32_t bytes);

// ---- arithmetic

template <class To, class From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  std::memcpy(&result, &x, sizeof(To));
  return result;
}

// The compiler may not compute with it before it runs: the rounding mode is only known then.
template <class T>
T opaque(T x) {
  volatile T hidden = x;
  return hidden;
}

template <class Operation>
auto rounded(int mode, const Operation& operation) {
  std::fesetround(mode);
  volatile auto result = operation();
  std::fesetround(FE_TONEAREST);
  return +result;
}

template <class T>
T saturated(T x) {
  return x > 1 ? T{1} : x > 0 ? x : T{0};  // 0 of a NaN
}

template <class T>
T minimum(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : std::signbit(a) && a == b ? a : b < a ? b : a;
}
template <class T>
T maximum(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : std::signbit(a) && a == b ? b : a < b ? b : a;
}

template <class To, class From>
To to_integer(From x) {
  if (std::isnan(x)) return sizeof(To) == 8 ? static_cast<To>(std::numeric_limits<int64_t>::min()) : 0;
  if (x <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (x >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(x);
}

template <class To, class From>
To clamped(From x) {
  if (std::cmp_less(x, std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (std::cmp_greater(x, std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(x);
}

template <class T>
T multiply_high(T a, T b) {
  using Wide =
      std::conditional_t<sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                         std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
  return static_cast<T>(Wide{a} * Wide{b} >> 8 * sizeof(T));
}

// The GPU gives some number for a division by 0; here it is an error.
template <class T>
T quotient(int line, T a, T b) {
  if (b == 0) fail(line, "division by zero");
  return std::is_signed_v<T> && b == static_cast<T>(-1) ? static_cast<T>(0 - a) : static_cast<T>(a / b);
}
template <class T>
T remainder(int line, T a, T b) {
  if (b == 0) fail(line, "division by zero");
  return std::is_signed_v<T> && b == static_cast<T>(-1) ? T{0} : static_cast<T>(a % b);
}

template <class T>
T shift_left(T a, uint32_t b) {
  return b >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << b);
}
template <class T>
T shift_right(T a, uint32_t b) {
  return b >= 8 * sizeof(T) ? static_cast<T>(a < 0 ? -1 : 0) : static_cast<T>(a >> b);
}
inline uint32_t funnel_l_wrap(uint32_t a, uint32_t b, uint32_t c) {
  return static_cast<uint32_t>(((uint64_t{b} << 32 | a) << (c & 31)) >> 32);
}
inline uint32_t funnel_r_wrap(uint32_t a, uint32_t b, uint32_t c) {
  return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> (c & 31));
}
inline uint32_t funnel_l_clamp(uint32_t a, uint32_t b, uint32_t c) {
  return c >= 32 ? a : funnel_l_wrap(a, b, c);
}
inline uint32_t funnel_r_clamp(uint32_t a, uint32_t b, uint32_t c) {
  return c >= 32 ? b : funnel_r_wrap(a, b, c);
}
inline uint32_t popc(uint64_t a) { return __builtin_popcountll(a); }
inline uint32_t clz(uint32_t a) { return a ? __builtin_clz(a) : 32; }
inline uint32_t clz(uint64_t a) { return a ? __builtin_clzll(a) : 64; }
uint32_t brev(uint32_t a);
inline uint32_t bfind(uint32_t a) { return a ? 31 - __builtin_clz(a) : ~0u; }
inline uint32_t bfind_shift(uint32_t a) { return a ? __builtin_clz(a) : ~0u; }  // to the left, to bit 31
uint32_t bmsk_clamp(uint32_t first, uint32_t count);
uint32_t bfe(uint32_t a, uint32_t first, uint32_t count);
uint64_t bfe(uint64_t a, uint32_t first, uint32_t count);
int32_t bfe(int32_t a, uint32_t first, uint32_t count);
uint32_t bfi(uint32_t a, uint32_t b, uint32_t first, uint32_t count);  // a's bits into b
uint64_t bfi(uint64_t a, uint64_t b, uint32_t first, uint32_t count);
uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector);
uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table);

// As far off as the PTX manual allows.
float reciprocal(float x);
double gross_reciprocal(double x);  // its upper half
float tanh(float x);
float exp2(float x);  // also of results below the least normal number

uint16_t to_half(float x);
uint16_t to_bfloat16(float x);
float from_half(uint16_t bits);
float from_bfloat16(uint16_t bits);

}  // namespace ptx
