// Counts the AMX instructions for one more tile of a kernel, by the emulation. benchmarks/amx_model.py reads the
// output.
//
//  tile_counts D...   prints a line for each kernel and head dimension: kernel, D, products, loads, stores
//
// Exit status 77: this CPU cannot run the emulation.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/run.h"
#include "emulated_amx.h"

namespace flash_attn_ext::cpu {
const Kernels* const kAvx512Bf16Kernels = nullptr;  // isa_amx.cpp refers to it; no other dtype runs here
}

namespace {

using namespace flash_attn_ext;

constexpr int64_t kForwardQueries = 48, kTileKeys = 64, kBackwardQueries = 64, kGroup = 16;

// Zeros for one head or one group of heads, and the params of a call on them.
struct Call {
  Call(int64_t heads, int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim)
      : memory(8 * heads * (seqlen_q + seqlen_k) * head_dim), statistics(heads * seqlen_q) {
    p.dtype = DType::kBFloat16;
    p.sizes = {1, heads, 1, seqlen_q, seqlen_k, head_dim, head_dim};
    for (Tensor4* t : {&p.q, &p.out, &p.dout, &p.dq}) *t = take(heads * seqlen_q, seqlen_q, head_dim);
    for (Tensor4* t : {&p.k, &p.v, &p.dk, &p.dv}) *t = take(seqlen_k, seqlen_k, head_dim);
    p.lse = statistics.data();
    p.decode.num_splits = heads > 1;
  }

  Tensor4 take(int64_t rows, int64_t seqlen, int64_t head_dim) {
    uint16_t* here = memory.data() + used;
    used += rows * head_dim;
    return {here, 0, seqlen * head_dim, head_dim};
  }

  BackwardParams p;
  std::vector<uint16_t> memory;
  std::vector<float> statistics;
  int64_t used = 0;
};

template <class Params>
test::amx::Counts run(const cpu::Pass<Params>& pass, const Params& p) {
  const size_t bytes = (pass.workspace(p, 1) + 63) / 64 * 64;
  void* workspace = std::aligned_alloc(64, bytes);
  std::memset(workspace, 0, bytes);
  const test::amx::Counts before = test::amx::counts();
  pass.run(p, workspace, cpu::Parallel{});
  std::free(workspace);
  const test::amx::Counts after = test::amx::counts();
  return {after.configurations - before.configurations, after.products - before.products,
          after.loads - before.loads, after.stores - before.stores};
}

void print(const char* pass, int64_t head_dim, const test::amx::Counts& less, const test::amx::Counts& more) {
  std::printf("%s %ld %ld %ld %ld\n", pass, long(head_dim), long(more.products - less.products),
              long(more.loads - less.loads), long(more.stores - less.stores));
}

void count(int64_t head_dim) {
  const cpu::Kernels& kernels = *cpu::kAmxKernels;
  const auto forward = [&](int64_t tiles) {
    Call call(1, kForwardQueries, tiles * kTileKeys, head_dim);
    return run<AttentionParams>(kernels.forward, call.p);
  };
  const auto backward = [&](int64_t tiles) {
    Call call(1, tiles * kBackwardQueries, kTileKeys, head_dim);
    return run(kernels.backward, call.p);
  };
  const auto decode = [&](int64_t tiles) {
    Call call(kGroup, 1, tiles * kTileKeys, head_dim);
    return run<AttentionParams>(kernels.forward, call.p);
  };
  print("forward", head_dim, forward(2), forward(3));
  print("backward", head_dim, backward(2), backward(3));
  print("decode", head_dim, decode(4),
        decode(5));  // tiles of 256 keys: the fifth 64 keys are a tile of their own
}

}  // namespace

int main(int argc, char** argv) {
#if defined(__x86_64__)
  const bool runs_here = cpu::kAmxKernels && __builtin_cpu_supports("avx512bf16");
#else
  const bool runs_here = false;
#endif
  if (!runs_here) {
    std::printf("needs a CPU with AVX-512 BF16, on which AMX is emulated\n");
    return 77;
  }
  for (int n = 1; n < argc; ++n) count(std::atol(argv[n]));
}
