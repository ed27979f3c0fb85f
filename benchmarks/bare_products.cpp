// Times the two products of decode on data in L1, for bfloat16 and AVX2: bounds for a call, which also reads memory. Prints ns a key
// and the fraction of the peak of peaks.cpp.
//
//   g++ -O3 -march=haswell -pthread benchmarks/bare_products.cpp -o build/bare_products && build/bare_products
//
// S has columns as lanes (decode_sums_of_columns-inl.h), P V broadcasts P (decode_lane_values-inl.h).
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>

#include "peaks.cpp"
#include "shortest.h"

constexpr int kColumns = 128, kMostRows = 8, L = 8;  // L: float32 lanes

alignas(64) uint16_t rows_of_16_bits[kKeys * kColumns];  // keys or values
alignas(64) float queries[kMostRows * kColumns], probs[kKeys * kMostRows], sums[kMostRows * kColumns];

// The even and the odd columns of 16 elements.
inline void widen(const uint16_t* from, __m256& even, __m256& odd) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

inline __m256 add_neighbours(__m256 a, __m256 b) {
  return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
}

// Lane i is the sum of the lanes of x[i].
inline __m256 sum_each(const __m256 (&x)[L]) {
  const __m256 a = add_neighbours(add_neighbours(x[0], x[1]), add_neighbours(x[2], x[3]));
  const __m256 b = add_neighbours(add_neighbours(x[4], x[5]), add_neighbours(x[6], x[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// S^T of 4 rows, two keys at once.
__attribute__((noinline)) void scores_of_4_rows() {
  constexpr int R = 4;
  for (int j = 0; j < kKeys; j += 2) {
    __m256 sum[2 * R] = {};
    const float* q = queries;
    for (int c = 0; c < kColumns; c += 2 * L) {
      __m256 key[2][2];
      for (int n = 0; n < 2; ++n) widen(rows_of_16_bits + (j + n) * kColumns + c, key[n][0], key[n][1]);
#pragma GCC unroll 8
      for (int i = 0; i < 2 * R; ++i, q += L) {
        __m256 query = _mm256_loadu_ps(q);
        asm("" : "+x"(query));  // one load for both keys
        for (int n = 0; n < 2; ++n)
          sum[n * R + i % R] = _mm256_fmadd_ps(query, key[n][i / R], sum[n * R + i % R]);
      }
    }
    _mm256_storeu_ps(probs + j * R, sum_each(sum));
  }
}

// O += P V of R rows from row `row` on, for kPairs * 16 columns in a pass.
template <int R, int kPairs>
__attribute__((noinline)) void add_values(int row) {
  for (int c = 0; c < kColumns; c += kPairs * 2 * L) {
    __m256 sum[R][2 * kPairs] = {};
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) {
      __m256 value[2 * kPairs];
      for (int n = 0; n < kPairs; ++n)
        widen(rows_of_16_bits + j * kColumns + c + n * 2 * L, value[2 * n], value[2 * n + 1]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256 prob = _mm256_broadcast_ss(probs + j * kMostRows + row + r);
#pragma GCC unroll 4
        for (int n = 0; n < 2 * kPairs; ++n) sum[r][n] = _mm256_fmadd_ps(prob, value[n], sum[r][n]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < 2 * kPairs; ++n) {
        float* to = sums + (row + r) * kColumns + c + n * L;
        _mm256_storeu_ps(to, _mm256_add_ps(_mm256_loadu_ps(to), sum[r][n]));
      }
  }
}

int main() {
  std::fill(std::begin(rows_of_16_bits), std::end(rows_of_16_bits), uint16_t{0x3f80});  // 1
  std::fill(std::begin(queries), std::end(queries), 0.5f);
  double peak = 0;  // FLOP/s of one thread
  for (int n = 0; n < 5; ++n) peak = std::max(peak, fma_float(1, 500'000));
  const auto print = [&](const char* name, int rows, double time) {
    std::printf("%-24s %5.1f ns a key, %.2f of the peak\n", name, time, 2e9 * rows * kColumns / time / peak);
  };
  print("S, 4 rows", 4, shortest(scores_of_4_rows));
  print("P V, 4 rows", 4, shortest([] { add_values<4, 1>(0); }));
  print("P V, 8 rows as 6 and 2", 8, shortest([] {
          add_values<6, 1>(0);
          add_values<2, 2>(6);
        }));
}
