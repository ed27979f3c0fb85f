#include "inputs.h"

#include <functional>
#include <limits>

namespace test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<double> random_values(Random& random, int64_t n, DType dtype, double low, double high) {
  std::vector<double> values(n);
  for (double& x : values) x = rounded(dtype, random.between(low, high));
  return values;
}

std::vector<double> random_mask(Random& random, const Case& c) {
  const Mask& mask = *c.mask;
  const Shape s = c.mask_shape();
  std::vector<double> values = random_values(random, count(s), mask.dtype, -1, 1);
  for (int64_t b = 0; b < s[0]; ++b)
    for (int64_t h = 0; h < s[1]; ++h)
      for (int64_t i = 0; i < s[2]; ++i)
        for (int64_t j = 0; j < s[3]; ++j) {
          double& x = values[at(s, b, h, i, j)];
          bool masked = mask.fill != MaskFill::kNothingMasked && random.chance(0.25);
          if (mask.fill == MaskFill::kBlocks)
            masked |= (i < 64 && j < 64) || i % 7 == 3 || j % 11 == 5 || (b == 0 && h == 0);
          if (mask.dtype == DType::kBool) {
            x = masked ? 0 : 1;
          } else if (masked) {
            x = -kInf;
          }
        }
  return values;
}

void fill_row(std::vector<double>& values, const Shape& s, int64_t b, int64_t h, int64_t i) {
  for (int64_t n = 0; n < s[3]; ++n) values[at(s, b, h, i, n)] = kNaN;
}

// Writes NaN to every key that no query sees, and to every query that sees no key.
void poison_hidden(const Case& c, Inputs& in) {
  const Sizes& z = c.sizes;
  std::vector<char> key_seen(z.batch * z.heads_kv * z.seqlen_k, 0);
  for (int64_t b = 0; b < z.batch; ++b)
    for (int64_t h = 0; h < z.heads; ++h)
      for (int64_t i = 0; i < z.seqlen_q; ++i) {
        bool sees = false;
        for (int64_t j = 0; j < z.seqlen_k; ++j)
          if (attends(c, in, b, h, i, j)) {
            sees = true;
            key_seen[(b * z.heads_kv + kv_head_of(c, h)) * z.seqlen_k + j] = true;
          }
        if (sees) continue;
        fill_row(in.q, c.q_shape(), b, h, i);
        fill_row(in.t_q, c.q_shape(), b, h, i);
        fill_row(in.dout, c.out_shape(), b, h, i);
        if (c.dlse) fill_row(in.dlse, c.lse_shape(), b, h, i);
      }
  for (int64_t n = 0; n < z.batch * z.heads_kv * z.seqlen_k; ++n) {
    if (key_seen[n]) continue;
    for (auto* keys : {&in.k, &in.t_k})
      fill_row(*keys, {1, 1, z.batch * z.heads_kv * z.seqlen_k, z.head_dim}, 0, 0, n);
    for (auto* values : {&in.v, &in.t_v})
      fill_row(*values, {1, 1, z.batch * z.heads_kv * z.seqlen_k, z.head_dim_v}, 0, 0, n);
  }
}

}  // namespace

Inputs make_inputs(const Case& c, DType dtype) {
  Random random(std::hash<std::string>()(c.name));
  const DType acc = accumulator_of(dtype);
  Inputs in;
  in.q = random_values(random, count(c.q_shape()), dtype, -2, 2);
  in.k = random_values(random, count(c.k_shape()), dtype, -2, 2);
  in.v = random_values(random, count(c.v_shape()), dtype, -2, 2);
  in.dout = random_values(random, count(c.out_shape()), dtype, -2, 2);
  in.dlse = random_values(random, c.dlse ? count(c.lse_shape()) : 0, acc, -2, 2);
  in.slopes = random_values(random, count(c.slopes_shape()), acc, 0.01, 0.5);
  in.rng_state = {static_cast<int64_t>(random.bits()), static_cast<int64_t>(random.bits())};
  if (c.mask) in.mask = random_mask(random, c);
  in.t_q = random_values(random, count(c.q_shape()), dtype, -1, 1);
  in.t_k = random_values(random, count(c.k_shape()), dtype, -1, 1);
  in.t_v = random_values(random, count(c.v_shape()), dtype, -1, 1);
  in.sink = random_values(random, count(c.sink_shape()), acc, -1, 2);
  in.t_sink = random_values(random, count(c.sink_shape()), acc, -1, 1);
  in.t_slopes = random_values(random, count(c.slopes_shape()), acc, -0.1, 0.1);
  if (c.mask && c.mask->dtype != DType::kBool)
    in.t_mask = random_values(random, count(c.mask_shape()), c.mask->dtype, -1, 1);
  if (c.expanded_dout)
    for (size_t n = 0; n < in.dout.size(); ++n) in.dout[n] = in.dout[n % c.sizes.head_dim_v];
  if (c.poison != Poison::kNowhere) poison_hidden(c, in);
  if (c.poison == Poison::kSeen) {
    const int64_t head = c.sizes.heads_kv - 1, key = c.sizes.seqlen_k - 1;
    fill_row(in.k, c.k_shape(), 0, head, key);
    fill_row(in.v, c.v_shape(), c.sizes.batch - 1, head, key);
  }
  return in;
}

}  // namespace test
