// Measures this machine's current limits: multiply-adds in registers, and reading memory. peaks.py
// compiles this file with the flags of the measured instruction set, and calls it through ctypes. Nothing
// here is part of the library.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__AVX512BF16__)
#include <immintrin.h>
typedef __m512 Sums;
typedef __m512bh Pairs;
#define DOT(sum, a, b) _mm512_dpbf16_ps(sum, a, b)
#elif defined(__ARM_FEATURE_BF16)
#include <arm_neon.h>
typedef float32x4_t Sums;
typedef bfloat16x8_t Pairs;
#define DOT(sum, a, b) vbfdotq_f32(sum, a, b)
#endif
#if defined(__AMX_BF16__)
#include "../csrc/cpu/amx.h"
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
constexpr int kChains =
    24;  // independent sums: enough for two FMA units of latency 4, and they fit in registers
#elif defined(__AVX__)
#define VECTOR_BYTES 32
constexpr int kChains = 10;
#elif defined(__aarch64__)
#define VECTOR_BYTES 16
constexpr int kChains = 24;
#else
#define VECTOR_BYTES 16
constexpr int kChains = 10;
#endif
#if defined(__aarch64__)
#define IN_REGISTER "+w"
#else
#define IN_REGISTER "+x"
#endif

constexpr int64_t kPage = 4096, kLargestPiece = 1 << 20;

namespace {

// Returns the seconds from the start of all threads to the end of the last thread. All threads wait for each other
// first. Otherwise a thread might end before the next thread starts, and would not share the memory.
template <class Work>
double seconds_of_all(int threads, const Work& work) {
  std::vector<double> seconds(threads);
  std::vector<std::thread> pool;
  std::atomic<int> missing{threads};
  for (int t = 0; t < threads; ++t)
    pool.emplace_back([&, t] {
      for (--missing; missing > 0;) std::this_thread::yield();
      const auto start = std::chrono::steady_clock::now();
      work();
      seconds[t] = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    });
  for (auto& thread : pool) thread.join();
  return *std::max_element(seconds.begin(), seconds.end());
}

template <class T>
void multiply_add(int64_t rounds) {
  typedef T V __attribute__((vector_size(VECTOR_BYTES)));
  V sum[kChains] = {};
  const V x = V{} + T(0.5), y = V{} + T(1);
  for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) {
      sum[i] = sum[i] * x + y;
      asm volatile("" : IN_REGISTER(sum[i]));  // keeps each sum in its register and each step in the loop
    }
  }
}

}  // namespace

extern "C" {

// Returns the FLOP/s of fused multiply-adds on `threads` threads, or 0 if the instruction does not exist.
double fma_float(int threads, int64_t rounds) {
  const double flops = 2.0 * rounds * kChains * (VECTOR_BYTES / sizeof(float)) * threads;
  return flops / seconds_of_all(threads, [&] { multiply_add<float>(rounds); });
}

double fma_double(int threads, int64_t rounds) {
  const double flops = 2.0 * rounds * kChains * (VECTOR_BYTES / sizeof(double)) * threads;
  return flops / seconds_of_all(threads, [&] { multiply_add<double>(rounds); });
}

double dot_bfloat16(int threads, int64_t rounds) {
#if defined(DOT)
  const double flops = 4.0 * rounds * kChains * (VECTOR_BYTES / sizeof(float)) * threads;
  return flops / seconds_of_all(threads, [&] {
           Sums sum[kChains] = {};
           const Pairs x = {};
           for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
             for (int i = 0; i < kChains; ++i) {
               sum[i] = DOT(sum[i], x, x);
               asm volatile("" : IN_REGISTER(sum[i]));
             }
           }
         });
#else
  (void)threads, (void)rounds;
  return 0;
#endif
}

// Returns the FLOP/s of products of whole tiles. The process must have the permission to use AMX.
double tile_bfloat16(int threads, int64_t rounds) {
#if defined(__AMX_BF16__)
  const double flops = 4.0 * 2 * 16 * 16 * 32 * rounds * threads;
  return flops / seconds_of_all(threads, [&] {
           alignas(64) struct {
             uint8_t palette = 1, unused[15] = {};
             uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
             uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
           } config;
           FA_TILE_CONFIGURE(config);  // all registers are 0 then
           for (int64_t r = 0; r < rounds; ++r) {
             FA_TILE_DOT_BFLOAT16(0, 4, 5);
             FA_TILE_DOT_BFLOAT16(1, 4, 5);
             FA_TILE_DOT_BFLOAT16(2, 4, 5);
             FA_TILE_DOT_BFLOAT16(3, 4, 5);
           }
           FA_TILE_RELEASE();
         });
#else
  (void)threads, (void)rounds;
  return 0;
#endif
}

// Returns the bytes per second of reading `bytes` once. A thread that finished a piece reads the next piece, so a
// delayed thread does not delay the result. The hardware's prefetching stops at the end of a page, so the loop
// prefetches the next page. A prefetch past the end of the data is ignored.
double stream_read(int threads, const char* data, int64_t bytes) {
  typedef uint64_t V __attribute__((vector_size(VECTOR_BYTES)));
  constexpr int64_t kStep = 8 * VECTOR_BYTES;
  const int64_t piece = std::min(kLargestPiece, bytes / threads) / kStep * kStep;
  if (piece == 0) return 0;
  const int64_t pieces = bytes / piece;
  std::atomic<int64_t> next{0};
  return pieces * piece / seconds_of_all(threads, [&] {
           V seen[8] = {};
           for (int64_t n; (n = next++) < pieces;)
             for (const char *p = data + n * piece, *end = p + piece; p < end; p += kStep)
               for (int i = 0; i < 8; ++i) {
                 __builtin_prefetch(p + kPage + i * VECTOR_BYTES);
                 V x;
                 std::memcpy(&x, p + i * VECTOR_BYTES, VECTOR_BYTES);
                 seen[i] |= x;
               }
           for (V& s : seen) asm volatile("" : IN_REGISTER(s));
         });
}
}
