#include "reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/philox.h"
#include "inputs.h"
#include "reference_scores.h"

namespace test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// The position of query i among the keys.
int64_t position(const Case& c, int64_t b, int64_t i) {
  return c.lower_right ? i + c.length(b, kKeys) - c.length(b, kQueries) : i;
}

double mask_value(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  return in.mask[mask_index(c, b, h, i, j)];
}

}  // namespace

double scale_of(const Case& c) {
  return c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.sizes.head_dim));
}

int64_t mask_index(const Case& c, int64_t b, int64_t h, int64_t i, int64_t j) {
  const Mask& m = *c.mask;
  return at(c.mask_shape(), m.per_batch ? b : 0, m.per_head ? h : 0, m.per_row ? i : 0, m.per_col ? j : 0);
}

int64_t slope_index(const Case& c, int64_t b, int64_t h) {
  return at(c.slopes_shape(), c.slopes == Slopes::kPerHead ? 0 : b, 0, 0, h);
}

double sink_of(const Case& c, const std::vector<double>& sink, int64_t b, int64_t h) {
  if (c.sink == Slopes::kNone) return -kInf;
  return sink[at(c.sink_shape(), c.sink == Slopes::kPerHead ? 0 : b, 0, 0, h)];
}

double distance(const Case& c, int64_t b, int64_t i, int64_t j) { return std::abs(position(c, b, i) - j); }

// The factor of element (i, j) of P under dropout.
double keep_factor(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (c.dropout_p == 0) return 1;
  const auto key = flash_attn_ext::philox_key(in.rng_state[0], in.rng_state[1]);
  const auto threshold = static_cast<uint64_t>(std::llround(c.dropout_p * 4294967296.0));
  const bool kept = flash_attn_ext::dropout_keeps(key, threshold, b * c.sizes.heads + h, i, j);
  return kept ? 1 / (1 - c.dropout_p) : 0;
}

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

Score score(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  const double* q = &in.q[at(c.q_shape(), b, h, i, 0)];
  const double* k = &in.k[at(c.k_shape(), b, kv_head_of(c, h), j, 0)];
  Score s{scale_of(c) * dot(q, k, c.sizes.head_dim), 1, 0};
  if (c.softcap > 0) {
    const double t = std::tanh(s.value / c.softcap);
    s = {c.softcap * t, 1 - t * t, -2 * t * (1 - t * t) / c.softcap};
  }
  if (c.slopes != Slopes::kNone) s.value -= in.slopes[slope_index(c, b, h)] * distance(c, b, i, j);
  if (c.mask && c.mask->dtype != DType::kBool) s.value += mask_value(c, in, b, h, i, j);
  return s;
}

namespace {

void forward_row(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, Outputs& r) {
  const Sizes& z = c.sizes;
  std::vector<double> scores(z.seqlen_k, -kInf);
  const double sink = sink_of(c, in.sink, b, h);
  double top = sink;
  bool nan = false;
  for (int64_t j = 0; j < z.seqlen_k; ++j) {
    if (!attends(c, in, b, h, i, j)) continue;
    scores[j] = score(c, in, b, h, i, j).value;
    nan |= std::isnan(scores[j]);
    top = std::max(top, scores[j]);
  }
  double* out = &r.out[at(c.out_shape(), b, h, i, 0)];
  double& lse = r.lse[at(c.lse_shape(), b, h, i, 0)];
  if (top == -kInf && !nan) {  // no key is visible: out stays 0
    lse = -kInf;
    return;
  }
  double sum = sink == -kInf ? 0 : std::exp(sink - top);
  for (const double s : scores) sum += nan ? kInf - kInf : std::exp(s - top);
  lse = top + std::log(sum);
  for (int64_t j = 0; j < z.seqlen_k; ++j) {
    if (!attends(c, in, b, h, i, j)) continue;
    const double p = std::exp(scores[j] - lse) * keep_factor(c, in, b, h, i, j);
    const double* v = &in.v[at(c.v_shape(), b, kv_head_of(c, h), j, 0)];
    for (int64_t n = 0; n < z.head_dim_v; ++n) out[n] += p * v[n];
  }
}

void backward_row(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, Outputs& r) {
  const Sizes& z = c.sizes;
  const int64_t h_kv = kv_head_of(c, h), row = at(c.out_shape(), b, h, i, 0);
  const double lse = r.lse[at(c.lse_shape(), b, h, i, 0)];
  const double dlse = c.dlse ? in.dlse[at(c.lse_shape(), b, h, i, 0)] : 0;
  const double delta = dot(&in.dout[row], &r.out[row], z.head_dim_v) - dlse;
  if (c.sink != Slopes::kNone)
    r.dsink[at(c.dslopes_shape(), b, h, 0, 0)] -= std::exp(sink_of(c, in.sink, b, h) - lse) * delta;
  for (int64_t j = 0; j < z.seqlen_k; ++j) {
    if (!attends(c, in, b, h, i, j)) continue;
    const Score s = score(c, in, b, h, i, j);
    const double p = std::exp(s.value - lse), keep = keep_factor(c, in, b, h, i, j);
    const int64_t v_row = at(c.v_shape(), b, h_kv, j, 0);
    const double dp = keep * dot(&in.dout[row], &in.v[v_row], z.head_dim_v);
    const double ds = p * (dp - delta);
    for (int64_t n = 0; n < z.head_dim_v; ++n) r.dv[v_row + n] += p * keep * in.dout[row + n];

    if (c.slopes != Slopes::kNone) r.dslopes[at(c.dslopes_shape(), b, h, 0, 0)] -= distance(c, b, i, j) * ds;
    if (c.mask) r.dmask[mask_index(c, b, h, i, j)] += ds;

    const double dproduct = ds * s.slope * scale_of(c);
    const int64_t q_row = at(c.q_shape(), b, h, i, 0), k_row = at(c.k_shape(), b, h_kv, j, 0);
    for (int64_t n = 0; n < z.head_dim; ++n) {
      r.dq[q_row + n] += dproduct * in.k[k_row + n];
      r.dk[k_row + n] += dproduct * in.q[q_row + n];
    }
  }
}

}  // namespace

int64_t kv_head_of(const Case& c, int64_t h) { return h * c.sizes.heads_kv / c.sizes.heads; }

bool attends(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (i >= c.length(b, kQueries) || j >= c.length(b, kKeys)) return false;
  const int64_t p = position(c, b, i);
  if (c.causal && j > p) return false;
  if (!c.causal && c.right >= 0 && j > p + c.right) return false;
  if (c.left >= 0 && j < p - c.left) return false;
  if (!c.mask) return true;
  return mask_value(c, in, b, h, i, j) != (c.mask->dtype == DType::kBool ? 0 : -kInf);
}

void reference_forward(const Case& c, const Inputs& in, Outputs& r) {
  r.out.assign(count(c.out_shape()), 0);
  r.lse.assign(count(c.lse_shape()), 0);
  for_each_row(c, in, r, forward_row);
}

void reference_backward(const Case& c, const Inputs& in, Outputs& r) {
  r.dq.assign(count(c.q_shape()), 0);
  r.dk.assign(count(c.k_shape()), 0);
  r.dv.assign(count(c.v_shape()), 0);
  r.dmask.assign(count(c.mask_shape()), 0);
  r.dslopes.assign(count(c.dslopes_shape()), 0);
  r.dsink.assign(count(c.dslopes_shape()), 0);
  for_each_row(c, in, r, backward_row);
}

double reference_self_check() {
  Case c;
  c.name = "self check";
  c.sizes = {2, 4, 2, 4, 5, 3, 2};
  c.lower_right = true;
  c.left = 3;
  c.right = 1;
  c.softcap = 2;
  c.mask = Mask{DType::kFloat64, true, false, true, true, MaskFill::kScattered, {}};
  c.slopes = c.sink = Slopes::kPerBatchAndHead;
  c.dropout_p = 0.25;
  Inputs in = make_inputs(c, DType::kFloat64);
  Outputs exact;
  reference_forward(c, in, exact);
  reference_backward(c, in, exact);

  auto loss = [&] {
    Outputs r;
    reference_forward(c, in, r);
    double sum = dot(r.out.data(), in.dout.data(), count(c.out_shape()));
    for (size_t n = 0; n < r.lse.size(); ++n) sum += r.lse[n] == -kInf ? 0 : r.lse[n] * in.dlse[n];
    return sum;
  };
  double worst = 0;
  auto check = [&](std::vector<double>& values, const std::vector<double>& gradient) {
    for (size_t n = 0; n < values.size(); ++n) {
      const double before = values[n], step = 1e-5;
      if (before == -kInf) continue;
      values[n] = before + step;
      const double above = loss();
      values[n] = before - step;
      const double below = loss();
      values[n] = before;
      const double difference = std::fabs((above - below) / (2 * step) - gradient[n]);
      worst = std::max(worst, difference / std::max(1.0, std::fabs(gradient[n])));
    }
  };
  check(in.q, exact.dq);
  check(in.k, exact.dk);
  check(in.v, exact.dv);
  check(in.mask, exact.dmask);
  check(in.slopes, exact.dslopes);
  check(in.sink, exact.dsink);
  return std::max(worst, derivatives_self_check(c, in));
}

}  // namespace test
