// Attention and its gradients in the plainest way: dense, fp64, one element at a time. Shares nothing with
// the kernels but core/philox.h, which defines the dropout mask.
#pragma once

#include <vector>

#include "case.h"

namespace test {

// Dense row-major values, already rounded to the dtype that the kernels will read.
struct Inputs {
  std::vector<double> q, k, v, mask, slopes, sink, dout, dlse;
  std::vector<double> t_q, t_k, t_v, t_mask, t_slopes, t_sink;  // tangents; without one of the mask, zero
  std::array<int64_t, 2> rng_state{};
};

struct Outputs {
  std::vector<double> out, lse, dq, dk, dv, dmask, dslopes, dsink;
  std::vector<double> t_out, t_lse;                       // forward mode
  std::vector<double> hq, hk, hv, hmask, hslopes, hsink;  // double backward
};

// Whether query i of head h sees key j: band and mask, nothing else.
bool attends(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j);

int64_t kv_head_of(const Case& c, int64_t h);

// Fills out and lse.
void reference_forward(const Case& c, const Inputs& in, Outputs& result);

// Fills the gradients, given out and lse.
void reference_backward(const Case& c, const Inputs& in, Outputs& result);

// Fills t_out and t_lse, given out and lse.
void reference_jvp(const Case& c, const Inputs& in, Outputs& result);

// Fills hq, hk, hv, hmask, hslopes and hsink, given out, lse, t_out and t_lse.
void reference_double_backward(const Case& c, const Inputs& in, Outputs& result);

// The largest relative difference between reference_backward and finite differences of reference_forward on a
// small problem that uses every option; and between forward mode and double backward and the finite differences,
// along the tangents, of forward and backward.
double reference_self_check();

}  // namespace test
