// wgmma, for every width and major-ness: 64 x N = A (64 x 64) B (64 x N), in four steps along k.
//
// The host writes A and B as they are to lie in shared memory. Places and descriptors are those of the
// kernels (csrc/cuda/sm90/panels.h).
#include <csrc/cuda/sm90/panels.h>

#include "unit.h"
#include "wgmma.h"

namespace gpu_units {
namespace {

namespace sm90 = flash_attn_ext::cuda::sm90;

constexpr int kThreads = 128, kM = 64, kK = 64, kStep = 16, kSteps = kK / kStep;
constexpr int kPanel = sm90::kPanelColumns, kAlignment = sm90::kSwizzleBytes;

enum class Source { kAlongK, kAlongM, kRegisters };  // A in shared memory: which index is contiguous

// A tile in shared memory with `kRows` rows; and the descriptor of its step-th 16 of k, both as the kernels
// have them.
template <int kRows, int kColumns>
using Tile = sm90::Panels<__half, kRows, (kColumns + kPanel - 1) / kPanel * kPanel>;

template <class T, bool kAlongK>
__device__ uint64_t step_descriptor(uint32_t tile, int step) {
  return kAlongK ? sm90::along_columns<T>(tile, step) : sm90::along_rows<T>(tile, step);
}

using ATile = Tile<kM, kK>;  // K-major or M-major: it is square
template <int kN, bool kAlongK>
using BTile = std::conditional_t<kAlongK, Tile<kN, kK>, Tile<kK, kN>>;

template <class In, int kN, Source kSource, bool kBAlongK>
__global__ __launch_bounds__(kThreads) void wgmma_kernel(const uint4* a_image, const uint4* b_image,
                                                         const uint16_t* a_rows, float* out) {
  using B = BTile<kN, kBAlongK>;
  extern __shared__ uint4 memory[];
  const uint32_t start = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  const uint32_t padding = (kAlignment - start % kAlignment) % kAlignment;
  uint4* tiles = memory + padding / 16;
  const uint32_t a_tile = start + padding, b_tile = a_tile + sizeof(ATile);
  for (int n = threadIdx.x; n < sizeof(ATile) / 16; n += kThreads) tiles[n] = a_image[n];
  for (int n = threadIdx.x; n < sizeof(B) / 16; n += kThreads) tiles[sizeof(ATile) / 16 + n] = b_image[n];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  uint32_t a[kSteps][4];
  for (int step = 0; step < kSteps; ++step)
    for (int n = 0; n < 4; ++n) {
      const int at = (row + n % 2 * 8) * kK + step * kStep + column + n / 2 * 8;
      a[step][n] = *reinterpret_cast<const uint32_t*>(a_rows + at);
    }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();

  float d[kN / 2];
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) d[n] = __int_as_float(0x7fffffff);  // the first step must not add to it
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t b = step_descriptor<B, kBAlongK>(b_tile, step);
    if constexpr (kSource == Source::kRegisters) {
      Wgmma<kN>::template registers<In, !kBAlongK>(d, a[step], b, step > 0);
    } else {
      constexpr bool kAAlongK = kSource == Source::kAlongK;
      Wgmma<kN>::template shared<In, !kAAlongK, !kBAlongK>(d, step_descriptor<ATile, kAAlongK>(a_tile, step),
                                                           b, step > 0);
    }
  }
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) {
    asm volatile("" : "+f"(d[n])::"memory");
    out[(row + n % 4 / 2 * 8) * kN + n / 4 * 8 + column + n % 2] = d[n];
  }
}

template <class In>
uint16_t bits(int value) {
  const In converted(static_cast<float>(value));
  uint16_t result;
  memcpy(&result, &converted, 2);
  return result;
}

int a_value(int m, int k) { return small_integer(m, k); }
int b_value(int n, int k) { return small_integer(n + 5, 2 * k); }

// A matrix as it lies in shared memory.
template <class In, int kRows, int kColumns, class Value>
std::vector<uint16_t> image(Value value) {
  using T = Tile<kRows, kColumns>;
  std::vector<uint16_t> result(sizeof(T) / 2, 0xffff);
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) result[T::offset(r, c) / 2] = bits<In>(value(r, c));
  return result;
}

template <class In, int kN, Source kSource, bool kBAlongK>
std::string wgmma() {
  const auto flipped = [](int (*value)(int, int)) { return [=](int r, int c) { return value(c, r); }; };
  const auto a_image =
      kSource == Source::kAlongM ? image<In, kK, kM>(flipped(a_value)) : image<In, kM, kK>(a_value);
  const auto b_image = kBAlongK ? image<In, kN, kK>(b_value) : image<In, kK, kN>(flipped(b_value));
  std::vector<uint16_t> a_rows(kM * kK);
  for (int n = 0; n < kM * kK; ++n) a_rows[n] = bits<In>(a_value(n / kK, n % kK));
  std::vector<float> expected(kM * kN);
  for (int n = 0; n < kM * kN; ++n)
    for (int k = 0; k < kK; ++k) expected[n] += a_value(n / kN, k) * b_value(n % kN, k);

  const Buffer<uint16_t> on_a(a_image), on_b(b_image), on_rows(a_rows);
  const Buffer<float> out(expected.size());
  const int bytes = sizeof(ATile) + sizeof(BTile<kN, kBAlongK>) + kAlignment;
  wgmma_kernel<In, kN, kSource, kBAlongK><<<1, kThreads, bytes>>>(reinterpret_cast<const uint4*>(on_a.get()),
                                                                  reinterpret_cast<const uint4*>(on_b.get()),
                                                                  on_rows.get(), out.get());
  finish();
  return first_difference(out.values(), expected, kN);
}

template <class In, int kN>
void add_units(std::vector<Unit>& units) {
  const std::string type = std::is_same_v<In, __half> ? "f16" : "bf16";
  const auto add = [&](const char* a, const char* b, std::string (*run)()) {
    units.push_back({"wgmma m64n" + std::to_string(kN) + "k16 " + type + ", A " + a + ", B " + b, run});
  };
  add("K-major", "K-major", wgmma<In, kN, Source::kAlongK, true>);
  add("K-major", "N-major", wgmma<In, kN, Source::kAlongK, false>);
  add("M-major", "K-major", wgmma<In, kN, Source::kAlongM, true>);
  add("M-major", "N-major", wgmma<In, kN, Source::kAlongM, false>);
  add("registers", "K-major", wgmma<In, kN, Source::kRegisters, true>);
  add("registers", "N-major", wgmma<In, kN, Source::kRegisters, false>);
}

}  // namespace

std::vector<Unit> wgmma_units() {
  std::vector<Unit> units;
  add_units<__nv_bfloat16, 64>(units);
  add_units<__nv_bfloat16, 80>(units);
  add_units<__nv_bfloat16, 96>(units);
  add_units<__nv_bfloat16, 128>(units);
  add_units<__nv_bfloat16, 192>(units);
  add_units<__nv_bfloat16, 256>(units);
  add_units<__half, 128>(units);
  return units;
}

}  // namespace gpu_units
