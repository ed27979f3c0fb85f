// The instructions of csrc/cuda/ptx.h, and stmatrix, as the PTX manual defines them.

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "fibers.h"
#include "fragments.h"
#include "include/hopper_on_host.h"
#include "include/ptx_on_host.h"
#include "memory.h"

namespace cuda_host {

namespace {

int64_t exponentials = 0;
uint32_t shared_base = 1024;

// A copy lands as late as possible: at the wait for its group. Until then its target holds NaN, and an access to the target
// is an error.
void cp_async(void* shared, const void* global, size_t bytes, bool inside, void* code) {
  if (inside) touch(global, bytes, false, code);
  touch(shared, bytes, true, code);
  std::memset(shared, 0xff, bytes);
  begin_flight(shared, bytes);
  current->copies.push_back({shared, global, bytes, inside, current->groups});
}

}  // namespace

float widen_float8(uint16_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const float magnitude = exponent == 15 && fraction == 7 ? NAN
                          : exponent == 0                 ? std::ldexp(fraction, -9)
                                                          : std::ldexp(8 + fraction, exponent - 10);
  return bits >> 7 & 1 ? -magnitude : magnitude;
}

// The numbers of the bytes 0 to 0x7e ascend.
uint8_t round_to_float8(float x) {
  if (x != x) return 0x7f;
  const float magnitude = std::fabs(x);
  uint8_t byte = 0;
  while (byte < 0x7e && widen_float8(byte + 1) <= magnitude) ++byte;
  if (byte < 0x7e) {
    const double below = magnitude - double{widen_float8(byte)},
                 above = double{widen_float8(byte + 1)} - magnitude;
    if (above < below || (above == below && byte % 2 == 1)) ++byte;
  }
  return byte | (std::signbit(x) ? 0x80 : 0);
}

uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int n = 0; n < 4; ++n) {
    const uint32_t digit = selector >> 4 * n & 15, byte = bytes >> 8 * (digit & 7) & 255;
    result |= (digit < 8 ? byte : byte < 128 ? 0 : 255) << 8 * n;
  }
  return result;
}

void cp_async_16(void* shared, const void* global, bool inside) {
  cp_async(shared, global, 16, inside, __builtin_return_address(0));
}

void cp_async_4(void* shared, const void* global, bool inside) {
  cp_async(shared, global, 4, inside, __builtin_return_address(0));
}

void cp_async_commit() { ++current->groups; }

void cp_async_wait(int pending) {
  std::vector<Fiber::Copy> later;
  for (const Fiber::Copy& copy : current->copies) {
    if (copy.group >= current->groups - pending) {
      later.push_back(copy);
      continue;
    }
    if (copy.inside) {
      std::memcpy(copy.shared, copy.global, copy.bytes);
    } else {
      std::memset(copy.shared, 0, copy.bytes);
    }
    end_flight(copy.shared, copy.bytes);
  }
  current->copies = later;
}

namespace {

struct LoadLane {
  const uint16_t* row;
  uint32_t* r;
};

template <bool kTransposed>
void load_matrices(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m) {
      const auto half = [&](int e) {
        const Element at = matrix_element(lane, e, kTransposed);
        return uint32_t{static_cast<const LoadLane*>(lanes[lane_of_row(m, at.row)])->row[at.column]};
      };
      static_cast<LoadLane*>(lanes[lane])->r[m] = half(0) | half(1) << 16;
    }
}

struct StoreLane {
  uint16_t* row;
  const uint32_t* r;
};

// The inverse of load_matrix().
void store_pairs(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m)
      for (int e = 0; e < 2; ++e) {
        const Element at = matrix_element(lane, e, false);
        const uint32_t pair = static_cast<const StoreLane*>(lanes[lane])->r[m];
        static_cast<const StoreLane*>(lanes[lane_of_row(m, at.row)])->row[at.column] = pair >> 16 * e;
      }
}

struct MmaLane {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
  float (*widen)(uint16_t bits);
};

void multiply(void* const* lanes) {
  const auto lane = [&](int n) { return static_cast<MmaLane*>(lanes[n]); };
  const auto half = [&](uint32_t pair, int upper) {
    return lane(0)->widen(upper ? pair >> 16 : pair & 0xffff);
  };
  float a[16][16], b[16][8], c[16][8];
  for (int n = 0; n < 32; ++n) {
    for (int e = 0; e < 2; ++e) {
      for (int r = 0; r < 4; ++r) {
        const Element at = mma_a_element(n, r, e);
        a[at.row][at.column] = half(lane(n)->a[r], e);
      }
      for (int r = 0; r < 2; ++r) {
        const Element at = mma_b_element(n, r, e);
        b[at.row][at.column] = half(lane(n)->b[r], e);
      }
    }
    for (int r = 0; r < 4; ++r) {
      const Element at = mma_c_element(n, r);
      c[at.row][at.column] = lane(n)->c[r];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) c[row][column] += a[row][k] * b[k][column];
  for (int n = 0; n < 32; ++n)
    for (int r = 0; r < 4; ++r) {
      const Element at = mma_c_element(n, r);
      lane(n)->c[r] = c[at.row][at.column];
    }
}

}  // namespace

void ldmatrix_x4(Site site, uint32_t* r, const void* row, bool transposed) {
  touch(row, 16, false, __builtin_return_address(0));
  LoadLane mine{static_cast<const uint16_t*>(row), r};
  combine_lanes(site, 0xffffffffu, &mine, transposed ? load_matrices<true> : load_matrices<false>);
}

void store_matrices(Site site, void* row, const uint32_t* r) {
  touch(row, 16, true, __builtin_return_address(0));
  StoreLane mine{static_cast<uint16_t*>(row), r};
  combine_lanes(site, 0xffffffffu, &mine, store_pairs);
}

void mma_m16n8k16(Site site, float* c, const uint32_t* a, uint32_t b0, uint32_t b1,
                  float (*widen)(uint16_t bits)) {
  MmaLane mine{c, a, {b0, b1}, widen};
  combine_lanes(site, 0xffffffffu, &mine, multiply);
}

int draw_ticket(int* ticket) { return add_atomically(ticket, 1); }

int add_atomically(int* number, int x) {
  touch_atomically(number, sizeof(int), __builtin_return_address(0));
  const int had = std::exchange(*number, *number + x);
  step_aside();
  return had;
}

unsigned long long change_number(unsigned long long* number, unsigned long long to) {
  touch_atomically(number, sizeof(*number), __builtin_return_address(0));
  return std::exchange(*number, to);
}

// For tests/ptx: one turn of a loop that waits until a number has some value. Who reads the same number again, from the
// same place, waits until it has changed.
int acquire_number(Site site, const int* number) {
  touch_atomically(number, sizeof(int), __builtin_return_address(0));
  step_aside();
  if (current->acquired_from == number) wait_until_changed(site, number, current->acquired);
  learn_blocks_of(number);
  current->acquired_from = number;
  return current->acquired = *number;
}

void acquire_turn(Site site, const int* turns, int turn) {
  touch_atomically(turns, sizeof(int), __builtin_return_address(0));
  step_aside();
  wait_until_turn(site, turns, turn);
  learn_blocks_of(turns);
}

void release_turn(int* turns) {
  touch_atomically(turns, sizeof(int), __builtin_return_address(0));
  tell_blocks_of(turns);
  ++*turns;
  step_aside();
}

// An error for x, up to 2^-22 of either sign. Equal x have equal errors.
double error_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return static_cast<int32_t>(bits * 2654435761u) * 0x1p-31 * 0x1p-22;
}

// With the largest errors that the PTX manual allows, and subnormals are 0.
float exp2_fast(float x) {
  ++exponentials;
  const double error = error_of(x);
  const float y = static_cast<float>(std::exp2(static_cast<double>(x)) * (1 + error));
  return y < std::numeric_limits<float>::min() ? 0 : y;  // NaN stays
}

float log2_fast(float x) {
  const double y = std::log2(std::abs(x) < std::numeric_limits<float>::min() ? 0.0 : static_cast<double>(x));
  const bool is_absolute = 0.5f < x && x < 2.0f;
  return static_cast<float>(is_absolute ? y + error_of(x) : y * (1 + error_of(x)));
}

uint32_t opaque_shared_address(const void* pointer) { return shared_address(pointer) + shared_base; }

}  // namespace cuda_host

extern "C" {
// The number of computed exponentials: a measure of the work, which includes recomputation.
int64_t exponentials() { return cuda_host::exponentials; }
float exp2_fast(float x) { return cuda_host::exp2_fast(x); }
// Sets the address of a block's shared memory for all later launches.
void set_shared_base(uint32_t base) { cuda_host::shared_base = base; }
}

// Of integers: the order of the additions is free.
unsigned long long atomicAdd(unsigned long long* sum, unsigned long long x) {
  return cuda_host::change_number(sum, *sum + x);
}
unsigned long long atomicMax(unsigned long long* most, unsigned long long x) {
  return cuda_host::change_number(most, *most < x ? x : *most);
}
unsigned long long atomicOr(unsigned long long* bits, unsigned long long x) {
  return cuda_host::change_number(bits, *bits | x);
}

float atomicAdd(float* sum, float x) {
  cuda_host::add_to_global(sum, sizeof(float), __builtin_return_address(0));
  return std::exchange(*sum, *sum + x);
}
