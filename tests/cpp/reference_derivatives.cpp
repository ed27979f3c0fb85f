// Forward mode and double backward, dense: the formulas of docs/derivative_formulas.md, row by row.
#include <cmath>
#include <limits>

#include "inputs.h"
#include "reference.h"
#include "reference_scores.h"

namespace test {
namespace {

double tangent_of_mask(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  return in.t_mask.empty() ? 0 : in.t_mask[mask_index(c, b, h, i, j)];
}

// One pair (i, j) of a row.
struct Pair {
  double prob, keep;
  Score score;
  double product_tangent;  // scale * w
  double tangent;          // e
};

Pair pair_at(const Case& c, const Inputs& in, const Outputs& r, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t d = c.sizes.head_dim, h_kv = kv_head_of(c, h);
  const int64_t q_row = at(c.q_shape(), b, h, i, 0), k_row = at(c.k_shape(), b, h_kv, j, 0);
  Pair pair;
  pair.score = score(c, in, b, h, i, j);
  pair.prob = std::exp(pair.score.value - r.lse[at(c.lse_shape(), b, h, i, 0)]);
  pair.keep = keep_factor(c, in, b, h, i, j);
  pair.product_tangent =
      scale_of(c) * (dot(&in.t_q[q_row], &in.k[k_row], d) + dot(&in.q[q_row], &in.t_k[k_row], d));
  pair.tangent = pair.score.slope * pair.product_tangent + tangent_of_mask(c, in, b, h, i, j);
  if (c.slopes != Slopes::kNone) pair.tangent -= distance(c, b, i, j) * in.t_slopes[slope_index(c, b, h)];
  return pair;
}

void jvp_row(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, Outputs& r) {
  const int64_t row = at(c.out_shape(), b, h, i, 0), d_v = c.sizes.head_dim_v;
  double& mu = r.t_lse[at(c.lse_shape(), b, h, i, 0)];
  bool sees = c.sink != Slopes::kNone;
  if (sees)
    mu = std::exp(sink_of(c, in.sink, b, h) - r.lse[at(c.lse_shape(), b, h, i, 0)]) *
         sink_of(c, in.t_sink, b, h);
  for (int64_t j = 0; j < c.sizes.seqlen_k; ++j) {
    if (!attends(c, in, b, h, i, j)) continue;
    sees = true;
    const Pair pair = pair_at(c, in, r, b, h, i, j);
    const int64_t v_row = at(c.v_shape(), b, kv_head_of(c, h), j, 0);
    mu += pair.prob * pair.tangent;
    for (int64_t n = 0; n < d_v; ++n)
      r.t_out[row + n] += pair.prob * pair.keep * (pair.tangent * in.v[v_row + n] + in.t_v[v_row + n]);
  }
  if (!sees) return;
  for (int64_t n = 0; n < d_v; ++n) r.t_out[row + n] -= mu * r.out[row + n];
}

void double_backward_row(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, Outputs& r) {
  const Sizes& z = c.sizes;
  const int64_t h_kv = kv_head_of(c, h), row = at(c.out_shape(), b, h, i, 0);
  const double* dout = &in.dout[row];
  const double dlse = c.dlse ? in.dlse[at(c.lse_shape(), b, h, i, 0)] : 0;
  const double mu = r.t_lse[at(c.lse_shape(), b, h, i, 0)];
  const double delta = dot(dout, &r.out[row], z.head_dim_v) - dlse;
  const double gamma = dot(dout, &r.t_out[row], z.head_dim_v) - mu * delta;
  if (c.sink != Slopes::kNone)
    r.hsink[at(c.dslopes_shape(), b, h, 0, 0)] -=
        std::exp(sink_of(c, in.sink, b, h) - r.lse[at(c.lse_shape(), b, h, i, 0)]) *
        (delta * sink_of(c, in.t_sink, b, h) + gamma);
  for (int64_t j = 0; j < z.seqlen_k; ++j) {
    if (!attends(c, in, b, h, i, j)) continue;
    const Pair pair = pair_at(c, in, r, b, h, i, j);
    const int64_t v_row = at(c.v_shape(), b, h_kv, j, 0);
    const double g = pair.keep * dot(dout, &in.v[v_row], z.head_dim_v);
    const double f = pair.keep * dot(dout, &in.t_v[v_row], z.head_dim_v);
    const double ds = pair.prob * (g - delta);
    const double gs = pair.prob * ((g - delta) * pair.tangent + f - mu * g - gamma);
    for (int64_t n = 0; n < z.head_dim_v; ++n)
      r.hv[v_row + n] += pair.prob * pair.keep * (pair.tangent - mu) * dout[n];
    if (c.slopes != Slopes::kNone) r.hslopes[at(c.dslopes_shape(), b, h, 0, 0)] -= distance(c, b, i, j) * gs;
    if (c.mask) r.hmask[mask_index(c, b, h, i, j)] += gs;

    const double scale = scale_of(c);
    const double z_ij = scale * (pair.score.slope * gs + pair.score.curvature * pair.product_tangent * ds);
    const double d_ij = scale * pair.score.slope * ds;
    const int64_t q_row = at(c.q_shape(), b, h, i, 0), k_row = at(c.k_shape(), b, h_kv, j, 0);
    for (int64_t n = 0; n < z.head_dim; ++n) {
      r.hq[q_row + n] += z_ij * in.k[k_row + n] + d_ij * in.t_k[k_row + n];
      r.hk[k_row + n] += z_ij * in.q[q_row + n] + d_ij * in.t_q[q_row + n];
    }
  }
}

}  // namespace

void reference_jvp(const Case& c, const Inputs& in, Outputs& r) {
  r.t_out.assign(count(c.out_shape()), 0);
  r.t_lse.assign(count(c.lse_shape()), 0);
  for_each_row(c, in, r, jvp_row);
}

void reference_double_backward(const Case& c, const Inputs& in, Outputs& r) {
  r.hq.assign(count(c.q_shape()), 0);
  r.hk.assign(count(c.k_shape()), 0);
  r.hv.assign(count(c.v_shape()), 0);
  r.hmask.assign(count(c.mask_shape()), 0);
  r.hslopes.assign(count(c.dslopes_shape()), 0);
  r.hsink.assign(count(c.dslopes_shape()), 0);
  for_each_row(c, in, r, double_backward_row);
}

double derivatives_self_check(const Case& c, const Inputs& in) {
  constexpr double kStep = 1e-5;
  auto results_at = [&](double step) {
    Inputs x = in;
    auto add = [&](std::vector<double>& to, const std::vector<double>& tangent) {
      for (size_t n = 0; n < to.size(); ++n) to[n] += step * tangent[n];
    };
    add(x.q, in.t_q);
    add(x.k, in.t_k);
    add(x.v, in.t_v);
    add(x.mask, in.t_mask);
    add(x.slopes, in.t_slopes);
    add(x.sink, in.t_sink);
    Outputs r;
    reference_forward(c, x, r);
    reference_backward(c, x, r);
    return r;
  };
  const Outputs above = results_at(kStep), below = results_at(-kStep);
  Outputs exact;
  reference_forward(c, in, exact);
  reference_jvp(c, in, exact);
  reference_double_backward(c, in, exact);

  double worst = 0;
  auto check = [&](std::vector<double> Outputs::* value, std::vector<double> Outputs::* derivative) {
    for (size_t n = 0; n < (exact.*derivative).size(); ++n) {
      if (std::isinf((above.*value)[n])) continue;  // lse of a row without visible keys
      const double difference = ((above.*value)[n] - (below.*value)[n]) / (2 * kStep);
      const double expected = (exact.*derivative)[n];
      worst = std::max(worst, std::fabs(difference - expected) / std::max(1.0, std::fabs(expected)));
    }
  };
  check(&Outputs::out, &Outputs::t_out);
  check(&Outputs::lse, &Outputs::t_lse);
  check(&Outputs::dq, &Outputs::hq);
  check(&Outputs::dk, &Outputs::hk);
  check(&Outputs::dv, &Outputs::hv);
  check(&Outputs::dmask, &Outputs::hmask);
  check(&Outputs::dslopes, &Outputs::hslopes);
  check(&Outputs::dsink, &Outputs::hsink);
  return worst;
}

}  // namespace test
