// Reads pages in the order of memory, in a random order and backwards, on one thread: a bound for a decode step with a cache in
// pages, which also reads pages in a random order. Prints ns a page.
//
//   g++ -O3 -march=haswell benchmarks/page_order.cpp -o build/page_order && build/page_order
//
// A page has 32 KiB, as 16 keys of 8 heads with 128 columns of 16 bits. Each line is prefetched two pages before it is read. "work":
// multiply-adds between the loads. With 16 of them a page takes as long as in a step with 4 heads a key head.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

constexpr size_t kPage = 32 << 10, kBytes = 128 << 20, kPages = kBytes / kPage, kHugePage = 2 << 20;
constexpr int kAhead = 2, kLine = 64, kVectors = 8;

float read_pages(const char* memory, const std::vector<size_t>& order, int work) {
  __m256 sum[kVectors] = {};
  for (size_t n = 0; n < kPages; ++n) {
    const char* page = memory + order[n] * kPage;
    const char* next = memory + order[(n + kAhead) % kPages] * kPage;
    for (size_t i = 0; i < kPage; i += sizeof(sum)) {
      for (size_t line = 0; line < sizeof(sum); line += kLine) _mm_prefetch(next + i + line, _MM_HINT_T0);
      for (int v = 0; v < kVectors; ++v)
        sum[v] = _mm256_add_ps(sum[v], _mm256_load_ps(reinterpret_cast<const float*>(page + i) + 8 * v));
      for (int times = 0; times < work; ++times)
        for (__m256& x : sum) x = _mm256_fmadd_ps(x, x, x);
    }
  }
  float total = 0;
  for (const __m256& x : sum) total += x[0];
  return total;
}

int main() {
  constexpr int kCalls = 25;
  std::vector<size_t> orders[3];  // in order, random, backwards
  for (auto& order : orders) {
    order.resize(kPages);
    std::iota(order.begin(), order.end(), size_t{0});
  }
  std::shuffle(orders[1].begin(), orders[1].end(), std::mt19937(1));
  std::reverse(orders[2].begin(), orders[2].end());
  for (const bool has_huge_pages : {false, true}) {
    char* memory = static_cast<char*>(std::aligned_alloc(kHugePage, kBytes));
    if (has_huge_pages) madvise(memory, kBytes, MADV_HUGEPAGE);
    std::fill(memory, memory + kBytes, char{0});
    for (const int work : {0, 16}) {
      double shortest[3];
      std::fill(shortest, shortest + 3, std::numeric_limits<double>::infinity());
      for (int call = 0; call < kCalls; ++call)
        for (int n = 0; n < 3; ++n) {  // the orders take turns
          const auto start = std::chrono::steady_clock::now();
          [[maybe_unused]] const volatile float total = read_pages(memory, orders[n], work);
          const std::chrono::duration<double, std::nano> time = std::chrono::steady_clock::now() - start;
          shortest[n] = std::min(shortest[n], time.count() / kPages);
        }
      std::printf("%s pages of the system, work %d: in order %.0f ns a page, random %.0f, backwards %.0f\n",
                  has_huge_pages ? "huge" : "4 KiB", work, shortest[0], shortest[1], shortest[2]);
    }
    std::free(memory);
  }
}
