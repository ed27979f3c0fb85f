// cp.async, ldmatrix and mma.sync by the kernels' own wrappers (csrc/cuda/ptx.h), against the rules in their
// comments.
#include <csrc/cuda/ptx.h>

#include "unit.h"

namespace gpu_units {
namespace {

namespace ptx = flash_attn_ext::cuda::ptx;

constexpr int kWarp = 32, kPieces = 64, kPieceBytes = 16;

// Copies 64 pieces of 16 bytes, every third one from outside.
__global__ void cp_async_kernel(const uint4* in, uint4* out) {
  __shared__ uint4 pieces[kPieces];
  const int n = threadIdx.x;
  ptx::cp_async_16(&pieces[n], &in[n], n % 3 != 0);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  out[n] = pieces[kPieces - 1 - n];
}

std::string cp_async() {
  constexpr int kWords = kPieceBytes / 4;
  std::vector<uint32_t> in(kPieces * kWords), expected(in.size());
  for (int n = 0; n < kPieces * kWords; ++n) in[n] = 1000 + n;
  for (int n = 0; n < kPieces; ++n)
    for (int w = 0; w < kWords; ++w)
      expected[(kPieces - 1 - n) * kWords + w] = n % 3 ? in[n * kWords + w] : 0;
  const Buffer<uint32_t> from(in), to(in.size());
  cp_async_kernel<<<1, kPieces>>>(reinterpret_cast<uint4*>(from.get()), reinterpret_cast<uint4*>(to.get()));
  finish();
  return first_difference(to.values(), expected, kWords);
}

// Four 8 x 8 matrices, element e of matrix m is 64 m + e. A lane's row of `out` is its four registers.
template <bool kTransposed>
__global__ void ldmatrix_kernel(uint32_t* out) {
  __shared__ alignas(16) uint16_t matrices[4][8][8];
  const int lane = threadIdx.x;
  for (int n = lane; n < 256; n += kWarp) matrices[n / 64][n / 8 % 8][n % 8] = n;
  __syncthreads();
  uint32_t r[4];
  if constexpr (kTransposed)
    ptx::ldmatrix_x4_trans(r, matrices[lane / 8][lane % 8]);
  else
    ptx::ldmatrix_x4(r, matrices[lane / 8][lane % 8]);
  for (int m = 0; m < 4; ++m) out[lane * 4 + m] = r[m];
}

template <bool kTransposed>
std::string ldmatrix() {
  std::vector<uint32_t> expected(kWarp * 4);
  for (int lane = 0; lane < kWarp; ++lane) {
    const int g = lane / 4, t = 2 * (lane % 4);
    const int first = kTransposed ? 8 * t + g : 8 * g + t, step = kTransposed ? 8 : 1;
    for (int m = 0; m < 4; ++m) {
      const uint32_t low = 64 * m + first, high = low + step;
      expected[lane * 4 + m] = low | high << 16;
    }
  }
  const Buffer<uint32_t> out(expected.size());
  ldmatrix_kernel<kTransposed><<<1, kWarp>>>(out.get());
  finish();
  return first_difference(out.values(), expected, 4);
}

template <class In>
__device__ uint32_t pair(float low, float high) {
  const In values[2] = {In(low), In(high)};
  uint32_t bits;
  memcpy(&bits, values, 4);
  return bits;
}

// c = 1 + a b with a 16 x 16 and b 16 x 8; the fragments are filled element by element.
template <class In>
__global__ void mma_kernel(const float* a, const float* b, float* c) {
  const int g = threadIdx.x / 4, t = 2 * (threadIdx.x % 4);
  const auto of_a = [&](int row, int column) {
    return pair<In>(a[row * 16 + column], a[row * 16 + column + 1]);
  };
  const auto of_b = [&](int row) { return pair<In>(b[row * 8 + g], b[(row + 1) * 8 + g]); };
  const uint32_t a_bits[4] = {of_a(g, t), of_a(g + 8, t), of_a(g, t + 8), of_a(g + 8, t + 8)};
  float sums[4] = {1, 1, 1, 1};
  ptx::mma_m16n8k16<In>(sums, a_bits, of_b(t), of_b(t + 8));
  for (int n = 0; n < 4; ++n) c[(g + n / 2 * 8) * 8 + t + n % 2] = sums[n];
}

template <class In>
std::string mma() {
  std::vector<float> a(16 * 16), b(16 * 8), expected(16 * 8, 1);
  for (int n = 0; n < 256; ++n) a[n] = small_integer(n / 16, n % 16);
  for (int n = 0; n < 128; ++n) b[n] = small_integer(n % 8 + 3, n / 8);
  for (int n = 0; n < 128; ++n)
    for (int k = 0; k < 16; ++k) expected[n] += a[n / 8 * 16 + k] * b[k * 8 + n % 8];
  const Buffer<float> on_a(a), on_b(b), on_c(expected.size());
  mma_kernel<In><<<1, kWarp>>>(on_a.get(), on_b.get(), on_c.get());
  finish();
  return first_difference(on_c.values(), expected, 8);
}

}  // namespace

std::vector<Unit> sm80_units() {
  return {
      {"cp.async of 16 bytes, zeros outside", cp_async},
      {"ldmatrix x4", ldmatrix<false>},
      {"ldmatrix x4 trans", ldmatrix<true>},
      {"mma.sync m16n8k16 bf16", mma<__nv_bfloat16>},
      {"mma.sync m16n8k16 f16", mma<__half>},
  };
}

}  // namespace gpu_units
