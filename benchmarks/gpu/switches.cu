// Times the plain forward kernels of sm90 as the compile-time switches are set. Prints a line for each problem, with
// its microseconds and a checksum of out. switches.py compiles this once for each setting, and compares.
#include <csrc/cuda/sm90/forward_launch.cuh>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

using flash_attn_ext::AttentionParams;
using flash_attn_ext::DType;
using flash_attn_ext::Tensor4;
namespace sm90 = flash_attn_ext::cuda::sm90;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::puts(cudaGetErrorString(status));
  std::exit(1);
}

constexpr int64_t kTokens = 16384, kColumns = 2048, kElements = kTokens * kColumns;  // as in problem.py
constexpr int64_t kShift = 12347;  // between the values of two tensors, so that q, k and v differ

// Values of bfloat16 around 1 of either sign, for all tensors of all problems.
const std::vector<uint16_t>& random_values() {
  static const std::vector<uint16_t> values = [] {
    std::vector<uint16_t> result(kElements + 3 * kShift);
    uint64_t state = 1;
    for (uint16_t& value : result) {
      state = state * 6364136223846793005 + 1442695040888963407;
      value = static_cast<uint16_t>(state >> 63 << 15 | 0x3f00 | (state >> 48 & 0xff));
    }
    return result;
  }();
  return values;
}

// The n-th tensor of a problem, (B, H, S, D).
Tensor4 make_tensor(int n, int64_t heads, int64_t length, int64_t head_dim) {
  Tensor4 t{nullptr, heads * length * head_dim, length * head_dim, head_dim};
  check(cudaMalloc(&t.data, kElements * 2));
  check(cudaMemcpy(t.data, random_values().data() + n * kShift, kElements * 2, cudaMemcpyHostToDevice));
  return t;
}

uint64_t checksum(const Tensor4& t) {
  std::vector<uint16_t> values(kElements);
  check(cudaMemcpy(values.data(), t.data, kElements * 2, cudaMemcpyDeviceToHost));
  uint64_t sum = 0;
  for (const uint16_t value : values) sum = sum * 31 + value;
  return sum;
}

template <int kHeadDim>
void measure(int64_t length, bool causal) {
  constexpr int kWarmUp = 3, kRepeats = 20;
  const int64_t batch = kTokens / length, heads = kColumns / kHeadDim;
  AttentionParams p{};
  p.dtype = DType::kBFloat16;
  p.sizes = {batch, heads, heads, length, length, kHeadDim, kHeadDim};
  p.scale = 0.125;
  if (causal) p.band.right = 0;
  int n = 0;
  for (Tensor4* t : {&p.q, &p.k, &p.v, &p.out}) *t = make_tensor(n++, heads, length, kHeadDim);
  check(cudaMalloc(&p.lse, batch * heads * length * sizeof(float)));

  cudaEvent_t start, stop;
  check(cudaEventCreate(&start));
  check(cudaEventCreate(&stop));
  for (int repeat = 0; repeat < kWarmUp + kRepeats; ++repeat) {
    if (repeat == kWarmUp) check(cudaEventRecord(start));
    check(sm90::launch_tiles<__nv_bfloat16, kHeadDim, kHeadDim, sm90::Form::kPlain>(p, {}, nullptr, nullptr));
  }
  check(cudaEventRecord(stop));
  check(cudaEventSynchronize(stop));
  float milliseconds;
  check(cudaEventElapsedTime(&milliseconds, start, stop));
  std::printf("%d %d %d %.2f %016llx\n", kHeadDim, static_cast<int>(length), causal,
              1000 * milliseconds / kRepeats, static_cast<unsigned long long>(checksum(p.out)));
  for (void* data : {p.q.data, p.k.data, p.v.data, p.out.data, static_cast<void*>(p.lse)})
    check(cudaFree(data));
}

}  // namespace

int main() {
  for (const int64_t length : {1024, 8192})
    for (const bool causal : {false, true}) {
      measure<64>(length, causal);
      measure<128>(length, causal);
      measure<256>(length, causal);
    }
}
