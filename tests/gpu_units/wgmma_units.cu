// wgmma, each form and width of csrc/cuda/sm90/wgmma.h: 64 x N = A (64 x K) B (K x N), in four steps along k. K is a panel
// of columns: 64 with 16 bits, 128 with 8.
//
// The host writes A and B in the layout of shared memory. Addresses, descriptors and instructions are the kernels'.
#include <csrc/cuda/launch.h>
#include <csrc/cuda/sm90/panels.h>
#include <csrc/cuda/sm90/ptx.h>
#include <cuda_fp8.h>
#include <csrc/cuda/sm90/pairs.cuh>

#include "unit.h"

namespace gpu_units {
namespace {

namespace sm90 = flash_attn_ext::cuda::sm90;
namespace ptx = flash_attn_ext::cuda::ptx;

constexpr int kThreads = 128, kM = 64, kSteps = 4, kAlignment = sm90::kSwizzleBytes;
template <class In>
constexpr int kPanel = sm90::kPanelRowBytes / sizeof(In);
template <class In>
constexpr int kK = kPanel<In>;
template <class In>
constexpr int kStep = kK<In> / kSteps;
constexpr float kBefore = 3;  // in the accumulator, where the first step adds to it

// By their names in wgmma.h.
enum class Form { kShared, kSharedByRows, kSharedRightByRows, kRegisters };
constexpr bool a_along_k(Form form) { return form != Form::kSharedByRows; }
// wgmma of 8 bits has no other form of B.
template <class In>
constexpr bool b_along_k(Form form) {
  return form == Form::kShared || sizeof(In) == 1;
}
constexpr bool may_overwrite(Form form) { return form == Form::kShared || form == Form::kSharedByRows; }

// A tile in shared memory with `kRows` rows; and the descriptor of its step-th part of k, both as the kernels
// have them.
template <class In, int kRows, int kColumns>
using Tile = sm90::Panels<In, kRows, sm90::whole_panels(kColumns, kPanel<In>)>;

// Of few columns the last ones of a panel, as in the backward of head dimension 64.
template <class In>
constexpr int first_column(int columns) {
  return columns < kPanel<In> ? kPanel<In> - columns : 0;
}

template <class T, bool kAlongK>
__device__ uint64_t step_descriptor(uint32_t tile, int step) {
  return kAlongK ? sm90::along_columns<T>(tile, step) : sm90::along_rows<T>(tile, step);
}

template <class In>
using ATile = Tile<In, kM, kK<In>>;  // K-major or, in 16 bits, M-major: there it is square
template <class In, int kN, bool kAlongK>
using BTile = std::conditional_t<kAlongK, Tile<In, kN, kK<In>>, Tile<In, kK<In>, kN>>;

// kPaired: both blocks of a cluster compute the same.
template <class In, int kN, Form kForm, bool kPaired>
__global__ __launch_bounds__(kThreads) void wgmma_kernel(const uint4* a_image, const uint4* b_image,
                                                         const In* a_rows, float* out) {
  using A = ATile<In>;
  using B = BTile<In, kN, b_along_k<In>(kForm)>;
  constexpr bool kFloat8 = sizeof(In) == 1;
  extern __shared__ uint4 memory[];
  const uint32_t start = sm90::descriptor_address<kPaired>(memory);
  const uint32_t padding = (kAlignment - start % kAlignment) % kAlignment;
  uint4* tiles = memory + padding / 16;
  const uint32_t a_tile = start + padding, b_tile = a_tile + sizeof(A);
  for (int n = threadIdx.x; n < sizeof(A) / 16; n += kThreads) tiles[n] = a_image[n];
  for (int n = threadIdx.x; n < sizeof(B) / 16; n += kThreads) tiles[sizeof(A) / 16 + n] = b_image[n];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
  constexpr int kOfRegister = 4 / sizeof(In);  // elements
  uint32_t a_registers[kSteps][4];
  for (int step = 0; step < kSteps; ++step)
    for (int n = 0; n < 4; ++n) {
      const int at =
          (row + n % 2 * 8) * kK<In> + step * kStep<In> + kOfRegister * (threadIdx.x % 4 + n / 2 * 4);
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
    const uint64_t a = step_descriptor<A, a_along_k(kForm)>(a_tile, step);
    const uint64_t b = step_descriptor<B, b_along_k<In>(kForm)>(
        b_tile + (b_along_k<In>(kForm) ? 0 : sm90::first_column<B>(first_column<In>(kN))), step);
    if constexpr (kForm == Form::kShared && kFloat8) ptx::wgmma_shared_float8(d, a, b, step > 0);
    if constexpr (kForm == Form::kShared && !kFloat8) ptx::wgmma_shared<In>(d, a, b, step > 0);
    if constexpr (kForm == Form::kSharedByRows) ptx::wgmma_shared_by_rows<In>(d, a, b, step > 0);
    if constexpr (kForm == Form::kSharedRightByRows) ptx::wgmma_shared_right_by_rows<In>(d, a, b);
    if constexpr (kForm == Form::kRegisters && kFloat8) ptx::wgmma_registers_float8(d, a_registers[step], b);
    if constexpr (kForm == Form::kRegisters && !kFloat8) ptx::wgmma_registers<In>(d, a_registers[step], b);
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>(d);
#pragma unroll
  for (int n = 0; n < kN / 2; ++n)
    out[(blockIdx.x * kM + row + n % 4 / 2 * 8) * kN + n / 4 * 8 + column + n % 2] = d[n];
}

int a_value(int m, int k) { return small_integer(m, k); }
int b_value(int n, int k) { return small_integer(n + 5, 2 * k); }

// The image of a matrix in shared memory.
template <class In, int kRows, int kColumns, class Value>
std::vector<unsigned char> image(Value value) {
  using T = Tile<In, kRows, kColumns>;
  std::vector<unsigned char> result(sizeof(T), 0xff);
  for (int r = 0; r < kRows; ++r)
    for (int c = 0; c < kColumns; ++c) {
      const In element(static_cast<float>(value(r, c)));
      memcpy(&result[T::offset(r, first_column<In>(kColumns) + c)], &element, sizeof(In));
    }
  return result;
}

template <class In, int kN, Form kForm, bool kPaired = false>
std::string wgmma() {
  constexpr int kBlocks = kPaired ? sm90::kPairBlocks : 1;
  const auto flipped = [](int (*value)(int, int)) { return [=](int r, int c) { return value(c, r); }; };
  constexpr int kDepth = kK<In>;
  const auto a_image =
      a_along_k(kForm) ? image<In, kM, kDepth>(a_value) : image<In, kDepth, kM>(flipped(a_value));
  const auto b_image =
      b_along_k<In>(kForm) ? image<In, kN, kDepth>(b_value) : image<In, kDepth, kN>(flipped(b_value));
  std::vector<In> a_rows(kM * kDepth);
  for (int n = 0; n < kM * kDepth; ++n) a_rows[n] = In(static_cast<float>(a_value(n / kDepth, n % kDepth)));
  std::vector<float> expected(kBlocks * kM * kN, may_overwrite(kForm) ? 0 : kBefore);
  for (int n = 0; n < kBlocks * kM * kN; ++n)
    for (int k = 0; k < kDepth; ++k) expected[n] += a_value(n / kN % kM, k) * b_value(n % kN, k);

  const Buffer<unsigned char> on_a(a_image), on_b(b_image);
  const Buffer<In> on_rows(a_rows);
  const Buffer<float> out(expected.size());
  const size_t bytes = sizeof(ATile<In>) + sizeof(BTile<In, kN, b_along_k<In>(kForm)>) + kAlignment;
  const flash_attn_ext::cuda::LaunchShape shape{kBlocks, 1, 1, kThreads, bytes, kBlocks};
  check(flash_attn_ext::cuda::launch(wgmma_kernel<In, kN, kForm, kPaired>, shape, nullptr,
                                     reinterpret_cast<const uint4*>(on_a.get()),
                                     reinterpret_cast<const uint4*>(on_b.get()), on_rows.get(), out.get()));
  finish();
  return first_difference(out.values(), expected, kN);
}

// The widths that wgmma.h has of this form, in both types of 16 bits.
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

// The same in float8_e4m3fn.
template <Form kForm, int... kWidths>
void add_float8_units(std::vector<Unit>& units, const std::string& name) {
  (units.push_back(
       {name + " m64n" + std::to_string(kWidths) + "k32 e4m3", wgmma<__nv_fp8_e4m3, kWidths, kForm>}),
   ...);
}

}  // namespace

std::vector<Unit> wgmma_units() {
  std::vector<Unit> units;
  add_units<Form::kShared, 32, 64, 80, 112, 128>(units, "wgmma_shared");
  add_units<Form::kSharedByRows, 32, 64, 128>(units, "wgmma_shared_by_rows");
  add_units<Form::kSharedRightByRows, 32, 64, 128>(units, "wgmma_shared_right_by_rows");
  add_units<Form::kRegisters, 64, 96, 128, 192, 256>(units, "wgmma_registers");
  units.push_back({"wgmma_shared_right_by_rows m64n128k16 bf16 in a pair of blocks",
                   wgmma<__nv_bfloat16, 128, Form::kSharedRightByRows, true>});
  add_float8_units<Form::kShared, 96, 128>(units, "wgmma_shared_float8");
  add_float8_units<Form::kRegisters, 64, 128, 256>(units, "wgmma_registers_float8");
  return units;
}

}  // namespace gpu_units
