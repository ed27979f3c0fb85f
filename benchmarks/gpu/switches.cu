// Times the plain forward kernels of sm90 as the compile-time switches are set. Prints a line for each problem, with
// its microseconds and a checksum of out. switches.py compiles this once for each setting, and compares.
#include <benchmarks/gpu/switches.h>
#include <csrc/cuda/sm90/forward_launch.cuh>

namespace {

using flash_attn_ext::AttentionParams;
using flash_attn_ext::DType;
using namespace switches;
namespace sm90 = flash_attn_ext::cuda::sm90;

uint64_t checksum(const Tensor4& t) {
  uint64_t sum = 0;
  for (const uint16_t value : values_of(t)) sum = sum * 31 + value;
  return sum;
}

template <int kHeadDim>
void measure(int64_t length, bool causal) {
  static const std::vector<uint16_t> values = random_values(0x3f00);
  const int64_t batch = kTokens / length, heads = kColumns / kHeadDim;
  AttentionParams p{};
  p.dtype = DType::kBFloat16;
  p.sizes = {batch, heads, heads, length, length, kHeadDim, kHeadDim};
  p.scale = 0.125;
  if (causal) p.band.right = 0;
  int n = 0;
  for (Tensor4* t : {&p.q, &p.k, &p.v, &p.out}) *t = make_tensor(values, n++, heads, length, kHeadDim);
  p.lse = allocate(batch * heads * length * sizeof(float));

  const float microseconds = microseconds_of(20, [&] {
    return sm90::launch_tiles<__nv_bfloat16, kHeadDim, kHeadDim, sm90::Form::kPlain>(p, {}, nullptr, nullptr);
  });
  std::printf("%d %d %d %.2f %016llx\n", kHeadDim, static_cast<int>(length), causal, microseconds,
              static_cast<unsigned long long>(checksum(p.out)));
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
