// The time of bare_products.cpp and bare_products_of_codes.cpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <limits>

constexpr int kKeys = 64;  // of a call

// Returns the shortest of many times of body(), ns a key.
template <class Body>
double shortest(const Body& body) {
  constexpr int kCalls = 10;
  double best = std::numeric_limits<double>::infinity();
  for (int n = 0; n < 20000; ++n) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) body();
    const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
    best = std::min(best, time.count() / (kCalls * kKeys));
  }
  return best;
}
