// The instructions of csrc/cuda/ptx.h, and stmatrix, as the PTX manual defines them.
#include <cstring>

#include "fibers.h"
#include "include/hopper_on_host.h"
#include "include/ptx_on_host.h"
#include "memory.h"

namespace cuda_host {

// A copy lands as late as it may, at the wait for its group. Until then its target holds NaN, and touching it
// is an error.
void cp_async_16(void* shared, const void* global, bool inside) {
  constexpr size_t kBytes = 16;
  if (inside) touch(global, kBytes, false, __builtin_return_address(0));
  touch(shared, kBytes, true, __builtin_return_address(0));
  std::memset(shared, 0xff, kBytes);
  begin_flight(shared, kBytes);
  current->copies.push_back({shared, global, inside, current->groups});
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
      std::memcpy(copy.shared, copy.global, 16);
    } else {
      std::memset(copy.shared, 0, 16);
    }
    end_flight(copy.shared, 16);
  }
  current->copies = later;
}

namespace {

struct LoadLane {
  const uint16_t* row;
  uint32_t* r;
};

// Matrix m's row n is what lane 8 m + n points to.
template <bool kTransposed>
void load_matrices(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m) {
      const int g = lane / 4, t = lane % 4;
      const auto element = [&](int row, int col) {
        return uint32_t{static_cast<const LoadLane*>(lanes[8 * m + row])->row[col]};
      };
      static_cast<LoadLane*>(lanes[lane])->r[m] = kTransposed
                                                      ? element(2 * t, g) | element(2 * t + 1, g) << 16
                                                      : element(g, 2 * t) | element(g, 2 * t + 1) << 16;
    }
}

struct StoreLane {
  uint16_t* row;
  const uint32_t* r;
};

// The other way round.
void store_pairs(void* const* lanes) {
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m) {
      uint16_t* row = static_cast<const StoreLane*>(lanes[8 * m + lane / 4])->row;
      std::memcpy(row + lane % 4 * 2, &static_cast<const StoreLane*>(lanes[lane])->r[m], 4);
    }
}

struct MmaLane {
  float* c;
  const uint32_t* a;
  uint32_t b[2];
  float (*widen)(uint16_t bits);
};

// Lane (g, t) holds of A the pairs (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), of B the pairs (2t, g)
// and (2t + 8, g), one below the other.
void multiply(void* const* lanes) {
  const auto lane = [&](int n) { return static_cast<MmaLane*>(lanes[n]); };
  const auto half = [&](uint32_t pair, int upper) {
    return lane(0)->widen(upper ? pair >> 16 : pair & 0xffff);
  };
  float a[16][16], b[16][8];
  for (int n = 0; n < 32; ++n)
    for (int upper = 0; upper < 2; ++upper) {
      const int g = n / 4, t = n % 4;
      for (int r = 0; r < 4; ++r) a[g + r % 2 * 8][2 * t + r / 2 * 8 + upper] = half(lane(n)->a[r], upper);
      for (int r = 0; r < 2; ++r) b[2 * t + r * 8 + upper][g] = half(lane(n)->b[r], upper);
    }
  for (int n = 0; n < 32; ++n)
    for (int r = 0; r < 4; ++r) {
      const int row = n / 4 + r / 2 * 8, col = n % 4 * 2 + r % 2;
      for (int k = 0; k < 16; ++k) lane(n)->c[r] += a[row][k] * b[k][col];
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

}  // namespace cuda_host
