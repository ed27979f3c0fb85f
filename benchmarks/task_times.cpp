// Prints the tasks of one call in the format of recorded_tasks.h. scaling.py compiles this file with recorded_tasks.h
// and the kernels of one instruction set, KERNELS. The arguments are:
//
//   B H H_kv S_q S_k D   left right   mask's B H S_q S_k, 0 0 0 0 without one   threads   forward|backward|mask_gradient
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/run.h"
#include "recorded_tasks.h"

using namespace flash_attn_ext;

namespace {

struct Array {
  explicit Array(int64_t heads, int64_t rows, int64_t cols, int64_t batch, bool random = true)
      : values(batch * heads * rows * cols), tensor{values.data(), heads * rows * cols, rows * cols, cols} {
    static std::minstd_rand generator(0);
    if (random)
      for (float& x : values) x = static_cast<float>(generator() % 2048) / 1024.0f - 1.0f;
  }
  std::vector<float> values;
  Tensor4 tensor;
};

template <class Params>
void run(const cpu::Pass<Params>& pass, const Params& params, const cpu::Parallel& parallel) {
  void* workspace = std::aligned_alloc(64, (pass.workspace(params, parallel.threads) + 127) / 64 * 64);
  for (int times = 0; times < 2; ++times) {  // the second time no memory is allocated
    cpu::record_call();
    pass.run(params, workspace, parallel);
    cpu::record("end %.9f\n", cpu::seconds_since_last());
  }
  std::free(workspace);
}

}  // namespace

int main(int, char** argv) {
  int64_t n[13];
  for (int i = 0; i < 13; ++i) n[i] = std::atoll(argv[i + 1]);
  const char* pass = argv[14];
  BackwardParams p;
  p.sizes = {n[0], n[1], n[2], n[3], n[4], n[5], n[5]};
  const Sizes& z = p.sizes;
  const auto of_q = [&](bool random = true) {
    return Array(z.heads, z.seqlen_q, z.head_dim, z.batch, random);
  };
  const auto of_k = [&](bool random = true) {
    return Array(z.heads_kv, z.seqlen_k, z.head_dim, z.batch, random);
  };
  Array q = of_q(), k = of_k(), v = of_k(), out = of_q(false), dout = of_q(), dq = of_q(false),
        dk = of_k(false), dv = of_k(false);
  Array lse(z.heads, z.seqlen_q, 1, z.batch, false);
  p.q = q.tensor, p.k = k.tensor, p.v = v.tensor, p.out = out.tensor, p.lse = lse.values.data();
  p.scale = 1 / std::sqrt(static_cast<double>(z.head_dim));
  p.band.diagonal = z.seqlen_k - z.seqlen_q;
  if (n[6] >= 0) p.band.left = n[6];
  if (n[7] >= 0) p.band.right = n[7];
  Array mask(n[9], n[10], n[11], n[8]), dmask(n[9], n[10], n[11], n[8], false);
  const auto stride = [&](int dim, int64_t value) { return n[8 + dim] == 1 ? 0 : value; };
  if (n[8] > 0)
    p.mask = {mask.values.data(),
              DType::kFloat32,
              stride(0, mask.tensor.stride_b),
              stride(1, mask.tensor.stride_h),
              stride(2, mask.tensor.stride_s),
              stride(3, 1)};

  const cpu::Parallel parallel{static_cast<int>(n[12]), nullptr};
  run<AttentionParams>(cpu::KERNELS->forward, p, parallel);
  if (std::strcmp(pass, "forward") == 0) return 0;
  p.dout = dout.tensor;
  if (std::strcmp(pass, "backward") == 0) p.dq = dq.tensor, p.dk = dk.tensor, p.dv = dv.tensor;
  if (std::strcmp(pass, "mask_gradient") == 0) p.dmask = {dmask.values.data(), n[8], n[9], n[10], n[11]};
  run<BackwardParams>(cpu::KERNELS->backward, p, parallel);
}
