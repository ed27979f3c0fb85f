// wgmma, each form and width of csrc/cuda/sm90/wgmma.h: 64 x N = A (64 x 64) B (64 x N), in four steps along
// k.
//
// The host writes A and B in the layout of shared memory. Addresses, descriptors and instructions are the ones
// of the kernels.
#include <csrc/cuda/sm90/panels.h>
#include <csrc/cuda/sm90/ptx.h>

#include "unit.h"

namespace gpu_units {
namespace {

namespace sm90 = flash_attn_ext::cuda::sm90;
namespace ptx = flash_attn_ext::cuda::ptx;

constexpr int kThreads = 128, kM = 64, kK = 64, kStep = 16, kSteps = kK / kStep;
constexpr int kPanel = sm90::kPanelColumns, kAlignment = sm90::kSwizzleBytes;
constexpr float kBefore = 3;  // in the accumulator, where the first step adds to it

// By their names in wgmma.h.
enum class Form { kShared, kSharedByRows, kSharedRightByRows, kRegisters };
constexpr bool a_along_k(Form form) { return form != Form::kSharedByRows; }
constexpr bool b_along_k(Form form) { return form == Form::kShared; }
constexpr bool may_overwrite(Form form) { return form == Form::kShared || form == Form::kSharedByRows; }

// A tile in shared memory with `kRows` rows; and the descriptor of its step-th 16 of k, both as the kernels
// have them.
template <int kRows, int kColumns>
using Tile = sm90::Panels<__half, kRows, (kColumns + kPanel - 1) / kPanel * kPanel>;

// Of few columns the last ones of a panel, as in the backward of head dimension 64.
constexpr int first_column(int columns) { return columns < kPanel ? kPanel - columns : 0; }

template <class T, bool kAlongK>
__device__ uint64_t step_descriptor(uint32_t tile, int step) {
  return kAlongK ? sm90::along_columns<T>(tile, step) : sm90::along_rows<T>(tile, step);
}

using ATile = Tile<kM, kK>;  // K-major or M-major: it is square
template <int kN, bool kAlongK>
using BTile = std::conditional_t<kAlongK, Tile<kN, kK>, Tile<kK, kN>>;

template <class In, int kN, Form kForm>
__global__ __launch_bounds__(kThreads) void wgmma_kernel(const uint4* a_image, const uint4* b_image,
                                                         const uint16_t* a_rows, float* out) {
  using B = BTile<kN, b_along_k(kForm)>;
  extern __shared__ uint4 memory[];
  const uint32_t start = ptx::shared_address(memory);
  const uint32_t padding = (kAlignment - start % kAlignment) % kAlignment;
  uint4* tiles = memory + padding / 16;
  const uint32_t a_tile = start + padding, b_tile = a_tile + sizeof(ATile);
  for (int n = threadIdx.x; n < sizeof(ATile) / 16; n += kThreads) tiles[n] = a_image[n];
  for (int n = threadIdx.x; n < sizeof(B) / 16; n += kThreads) tiles[sizeof(ATile) / 16 + n] = b_image[n];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  uint32_t a_registers[kSteps][4];
  for (int step = 0; step < kSteps; ++step)
    for (int n = 0; n < 4; ++n) {
      const int at = (row + n % 2 * 8) * kK + step * kStep + column + n / 2 * 8;
      a_registers[step][n] = *reinterpret_cast<const uint32_t*>(a_rows + at);
    }
  ptx::proxy_fence();  // publishes this thread's writes to wgmma
  __syncthreads();     // all of them have

  float d[kN / 2];
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) {
    d[n] = may_overwrite(kForm) ? __int_as_float(0x7fffffff) : kBefore;  // the first step must not add to NaN
    asm volatile("" : "+f"(d[n]));                                       // written before the fence
  }
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint64_t a = step_descriptor<ATile, a_along_k(kForm)>(a_tile, step);
    const uint64_t b = step_descriptor<B, b_along_k(kForm)>(
        b_tile + (b_along_k(kForm) ? 0 : sm90::first_column<B>(first_column(kN))), step);
    if constexpr (kForm == Form::kShared) ptx::wgmma_shared<In>(d, a, b, step > 0);
    if constexpr (kForm == Form::kSharedByRows) ptx::wgmma_shared_by_rows<In>(d, a, b, step > 0);
    if constexpr (kForm == Form::kSharedRightByRows) ptx::wgmma_shared_right_by_rows<In>(d, a, b);
    if constexpr (kForm == Form::kRegisters) ptx::wgmma_registers<In>(d, a_registers[step], b);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
#pragma unroll
  for (int n = 0; n < kN / 2; ++n) out[(row + n % 4 / 2 * 8) * kN + n / 4 * 8 + column + n % 2] = d[n];
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

// The image of a matrix in shared memory.
template <class In, int kRows, int kColumns, class Value>
std::vector<uint16_t> image(Value value) {
  using T = Tile<kRows, kColumns>;
  std::vector<uint16_t> result(sizeof(T) / 2, 0xffff);
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c)
      result[T::offset(r, first_column(kColumns) + c) / 2] = bits<In>(value(r, c));
  return result;
}

template <class In, int kN, Form kForm>
std::string wgmma() {
  const auto flipped = [](int (*value)(int, int)) { return [=](int r, int c) { return value(c, r); }; };
  const auto a_image = a_along_k(kForm) ? image<In, kM, kK>(a_value) : image<In, kK, kM>(flipped(a_value));
  const auto b_image = b_along_k(kForm) ? image<In, kN, kK>(b_value) : image<In, kK, kN>(flipped(b_value));
  std::vector<uint16_t> a_rows(kM * kK);
  for (int n = 0; n < kM * kK; ++n) a_rows[n] = bits<In>(a_value(n / kK, n % kK));
  std::vector<float> expected(kM * kN, may_overwrite(kForm) ? 0 : kBefore);
  for (int n = 0; n < kM * kN; ++n)
    for (int k = 0; k < kK; ++k) expected[n] += a_value(n / kN, k) * b_value(n % kN, k);

  const Buffer<uint16_t> on_a(a_image), on_b(b_image), on_rows(a_rows);
  const Buffer<float> out(expected.size());
  const int bytes = sizeof(ATile) + sizeof(BTile<kN, b_along_k(kForm)>) + kAlignment;
  const auto kernel = wgmma_kernel<In, kN, kForm>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<1, kThreads, bytes>>>(reinterpret_cast<const uint4*>(on_a.get()),
                                 reinterpret_cast<const uint4*>(on_b.get()), on_rows.get(), out.get());
  finish();
  return first_difference(out.values(), expected, kN);
}

// The widths that wgmma.h has of this form, in both types.
template <Form kForm, int... kWidths>
void add_units(std::vector<Unit>& units, const std::string& name) {
  const auto add = [&](int width, const char* type, std::string (*run)()) {
    std::string title = name + " m64n" + std::to_string(width) + "k16 " + type;
    if ((kForm == Form::kSharedByRows || kForm == Form::kSharedRightByRows) && width == 32)
      title += " (if refused: FLASH_ATTN_EXT_SM90_WGMMA_N32 0)";
    if (kForm == Form::kRegisters && width == 96) title += " (if refused: FLASH_ATTN_EXT_SM90_WGMMA_N96 0)";
    units.push_back({title, run});
  };
  (add(kWidths, "bf16", wgmma<__nv_bfloat16, kWidths, kForm>), ...);
  (add(kWidths, "f16", wgmma<__half, kWidths, kForm>), ...);
}

}  // namespace

std::vector<Unit> wgmma_units() {
  std::vector<Unit> units;
  add_units<Form::kShared, 32, 64, 80, 112, 128>(units, "wgmma_shared");
  add_units<Form::kSharedByRows, 32, 64, 128>(units, "wgmma_shared_by_rows");
  add_units<Form::kSharedRightByRows, 32, 64, 128>(units, "wgmma_shared_right_by_rows");
  add_units<Form::kRegisters, 64, 96, 128, 192, 256>(units, "wgmma_registers");
  return units;
}

}  // namespace gpu_units
