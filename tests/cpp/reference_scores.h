// Shared by the dense references of all derivatives: one score, and the loop over the rows.
#pragma once

#include "reference.h"

namespace test {

struct Score {
  double value;
  double slope;      // d(value) / d(scale * <q, k>)
  double curvature;  // d(slope) / d(scale * <q, k>)
};

Score score(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j);
double scale_of(const Case& c);
double distance(const Case& c, int64_t b, int64_t i, int64_t j);                                  // ALiBi's
double keep_factor(const Case& c, const Inputs& in, int64_t b, int64_t h, int64_t i, int64_t j);  // dropout's
double dot(const double* a, const double* b, int64_t n);

// Index of this pair's values in the mask and the slopes.
int64_t mask_index(const Case& c, int64_t b, int64_t h, int64_t i, int64_t j);
int64_t slope_index(const Case& c, int64_t b, int64_t h);

// The sink's score, -inf without a sink, and its tangent.
double sink_of(const Case& c, const std::vector<double>& sink, int64_t b, int64_t h);

template <class Row>
void for_each_row(const Case& c, const Inputs& in, Outputs& r, Row row) {
  for (int64_t b = 0; b < c.sizes.batch; ++b)
    for (int64_t h = 0; h < c.sizes.heads; ++h)
      for (int64_t i = 0; i < c.length(b, kQueries); ++i) row(c, in, b, h, i, r);
}

// Returns the largest relative difference of forward mode and double backward to finite differences of forward and
// backward along the tangents.
double derivatives_self_check(const Case& c, const Inputs& in);

}  // namespace test
