// Times the plain backward of sm90 at head dimension 256 in pairs of blocks and in single blocks
// (FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS), and compares the gradients. Prints a line for each problem: head dimension,
// length, causal, microseconds in pairs, microseconds in single blocks, whether the gradients agree.
#include <benchmarks/gpu/switches.h>
#include <csrc/cuda/sm90/backward_launch.cuh>

#include <cmath>

namespace {

using flash_attn_ext::BackwardParams;
using flash_attn_ext::DType;
using namespace switches;
namespace sm90 = flash_attn_ext::cuda::sm90;

constexpr int kHeadDim = 256;
constexpr int64_t kHeads = kColumns / kHeadDim;

float widen(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float x;
  static_assert(sizeof x == sizeof word);
  __builtin_memcpy(&x, &word, sizeof x);
  return x;
}

// Whether two results differ by at most the rounding of additions in another order.
bool are_near(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b) {
  float largest = 0, difference = 0;
  for (size_t n = 0; n < a.size(); ++n) {
    const float distance = std::fabs(widen(a[n]) - widen(b[n]));
    if (!(distance < INFINITY)) return false;
    difference = std::fmax(difference, distance);
    largest = std::fmax(largest, std::fabs(widen(b[n])));
  }
  return difference <= largest / 128;
}

struct Gradients {
  std::vector<uint16_t> dq, dk, dv;
};

template <bool kPaired>
Gradients measure(const BackwardParams& p, void* workspace, float& microseconds) {
  microseconds = microseconds_of(10, [&] {
    return sm90::launch_backward_tiles<__nv_bfloat16, kHeadDim, kHeadDim, true, kPaired>(p, workspace,
                                                                                         nullptr);
  });
  return {values_of(p.dq), values_of(p.dk), values_of(p.dv)};
}

void compare(int64_t length, bool causal) {
  const int64_t batch = kTokens / length;
  BackwardParams p{};
  p.dtype = DType::kBFloat16;
  p.sizes = {batch, kHeads, kHeads, length, length, kHeadDim, kHeadDim};
  p.scale = 0.0625;
  if (causal) p.band.right = 0;
  static const std::vector<uint16_t> values = random_values(0x3e00);
  Tensor4* const tensors[kMostTensors] = {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv};
  for (int n = 0; n < kMostTensors; ++n) *tensors[n] = make_tensor(values, n, kHeads, length, kHeadDim);
  // The log of the number of keys, so that the weights of a row add up to about 1.
  const std::vector<float> lse(batch * kHeads * length, std::log(static_cast<float>(length)));
  p.lse = static_cast<float*>(allocate(lse.size() * sizeof(float)));
  check(cudaMemcpy(const_cast<void*>(static_cast<const void*>(p.lse)), lse.data(), lse.size() * sizeof(float),
                   cudaMemcpyHostToDevice));
  void* const workspace = allocate(sm90::BackwardWorkspace::bytes(p));

  float in_pairs, alone;
  const Gradients a = measure<true>(p, workspace, in_pairs), b = measure<false>(p, workspace, alone);
  const bool agree = a.dk == b.dk && a.dv == b.dv && are_near(a.dq, b.dq);
  std::printf("%d %d %d %.2f %.2f %s\n", kHeadDim, static_cast<int>(length), causal, in_pairs, alone,
              agree ? "yes" : "NO");
  std::fflush(stdout);
  for (Tensor4* t : tensors) check(cudaFree(t->data));
  check(cudaFree(const_cast<void*>(static_cast<const void*>(p.lse))));
  check(cudaFree(workspace));
}

}  // namespace

int main() {
  for (const int64_t length : {1024, 8192})
    for (const bool causal : {false, true}) compare(length, causal);
}
