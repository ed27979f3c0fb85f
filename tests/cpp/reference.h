// Attention and its gradients in the simplest way: dense, fp64, one element at a time. It shares only core/philox.h
// with the kernels, which defines the dropout mask.
#pragma once

#include <vector>

#include "case.h"

namespace test {

// Dense row-major values, already rounded to the dtype of the kernels.
struct Inputs {
  std::vector<double> q, k, v, mask, slopes, sink, dout, dlse;
  std::vector<double> t_q, t_k, t_v, t_mask, t_slopes, t_sink;  // tangents; 0 if there is none of the mask
  std::array<int64_t, 2> rng_state{};
};

struct Outputs {
  std::vector<double> out, lse, dq, dk, dv, dmask, dslopes, dsink;
  std::vector<double> t_out, t_lse;                       // forward mode
  std::vector<double> hq, hk, hv, hmask, hslopes, hsink;  // double backward
};

// Returns whether query i of head h sees key j under band and mask.
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

// Returns the largest relative difference between reference and finite differences, on a small problem with every
// option. Compares reference_backward with differences of reference_forward. Compares forward mode and double backward
// with differences of forward and backward along the tangents.
double reference_self_check();

}  // namespace test
