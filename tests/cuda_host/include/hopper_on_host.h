// csrc/cuda/sm90/ptx.h and wgmma.h for a run on the host: the same functions, which the files hopper_*.cpp define.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"
#include "ptx_on_host.h"

using std::max;
using std::min;

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace cuda_host {

void meet_named(Site site, int barrier, int threads);
void proxy_fence();
void release_registers(Site site, int count);
void claim_registers(Site site, int count);
void barrier_init(uint64_t* barrier, uint32_t arrivals);
void barrier_init_fence();
void barrier_arrive(uint64_t* barrier, uint32_t bytes);
void barrier_arrive_in_cluster(Site site, uint64_t* barrier, uint32_t rank);
void barrier_wait(Site site, uint64_t* barrier, uint32_t parity);
// The threads of the cluster meet in two steps.
void cluster_arrive(Site site);
void cluster_wait(Site site);
void load_box(Site site, void* shared, const CUtensorMap* map, const int32_t* corner, int rank,
              uint64_t* barrier);
// blocks: a bit for each block of the cluster that gets the box.
void load_box_into_blocks(Site site, void* shared, const CUtensorMap* map, const int32_t* corner, int rank,
                          uint64_t* barrier, uint32_t blocks);
void store_box(Site site, const CUtensorMap* map, const int32_t* corner, int rank, const void* shared);
void load_bytes(Site site, void* shared, const void* global, uint32_t bytes, uint64_t* barrier);
void bulk_add(Site site, float* sums, const float* terms, uint32_t count);
void bulk_commit();
void bulk_wait_read();
void bulk_wait();
void release_bulk_turn(Site site, int32_t* turns);
void store_matrices(Site site, void* row, const uint32_t* r);
// prmt.b32 without a mode. Bits [4n, 4n + 3) of the selector choose byte n of the result from (high, low). If bit 4n +
// 3 is set, byte n has copies of the chosen byte's sign.
uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector);

// d += a b, or d = a b: 64 x depth by depth x columns; depth is 32 bytes. `a` comes from shared memory if a_registers is
// null. By rows: its rows (b: columns) are contiguous, not k. 8-bit elements cannot be stored by rows.
struct Product {
  float* d;
  uint64_t a, b;
  const uint32_t* a_registers;
  int columns;
  bool accumulate, a_by_rows, b_by_rows;
  float (*widen)(uint16_t bits);
  bool negative = false;  // d -= a b, or d = -a b
  int element_bytes = 2;
  int rank = 0;  // of the block that multiplies; wgmma() sets it

  int depth() const { return 32 / element_bytes; }
};
void wgmma(Site site, const Product& product);
void wgmma_fence(Site site);
void wgmma_commit(Site site);
void wgmma_wait(Site site, int pending);

// float8_e4m3fn: the number of a byte; and the nearest byte, ties to even, at most 448.
float widen_float8(uint16_t bits);
uint8_t round_to_float8(float x);

template <class In>
float widen_element(uint16_t bits) {
  In x;
  std::memcpy(&x, &bits, sizeof(x));
  if constexpr (std::is_same_v<In, __half>) {
    return __half2float(x);
  } else {
    return __bfloat162float(x);
  }
}

}  // namespace cuda_host

namespace flash_attn_ext::cuda::ptx {

using Barrier = uint64_t;
using cuda_host::barrier_init_fence;
using cuda_host::bulk_commit;
using cuda_host::bulk_wait;
using cuda_host::bulk_wait_read;
using cuda_host::proxy_fence;

inline void barrier_init(Barrier& barrier, uint32_t arrivals) { cuda_host::barrier_init(&barrier, arrivals); }
inline void barrier_arrive(Barrier& barrier) { cuda_host::barrier_arrive(&barrier, 0); }
inline void barrier_arrive_expecting(Barrier& barrier, uint32_t bytes) {
  cuda_host::barrier_arrive(&barrier, bytes);
}
inline void barrier_wait(Barrier& barrier, uint32_t parity, CUDA_HOST_SITE) {
  cuda_host::barrier_wait({"barrier_wait", file, line}, &barrier, parity);
}
inline void barrier_arrive_in_cluster(Barrier& barrier, uint32_t rank, CUDA_HOST_SITE) {
  cuda_host::barrier_arrive_in_cluster({"barrier_arrive_in_cluster", file, line}, &barrier, rank);
}
inline void cluster_sync(CUDA_HOST_SITE) {
  cuda_host::cluster_arrive({"cluster_sync", file, line});
  cuda_host::cluster_wait({"cluster_sync", file, line});
}
template <int kRank>
void load_box(void* shared, const void* map, const int32_t (&corner)[kRank], Barrier& barrier,
              CUDA_HOST_SITE) {
  cuda_host::load_box({"load_box", file, line}, shared, static_cast<const CUtensorMap*>(map), corner, kRank,
                      &barrier);
}

template <int kRank>
void load_box_into_blocks(void* shared, const void* map, const int32_t (&corner)[kRank], Barrier& barrier,
                          uint16_t blocks, CUDA_HOST_SITE) {
  cuda_host::load_box_into_blocks({"load_box_into_blocks", file, line}, shared,
                                  static_cast<const CUtensorMap*>(map), corner, kRank, &barrier, blocks);
}
template <int kRank>
void store_box(const void* map, const int32_t (&corner)[kRank], const void* shared, CUDA_HOST_SITE) {
  cuda_host::store_box({"store_box", file, line}, static_cast<const CUtensorMap*>(map), corner, kRank,
                       shared);
}
inline void load_bytes(void* shared, const void* global, uint32_t bytes, Barrier& barrier, CUDA_HOST_SITE) {
  cuda_host::load_bytes({"load_bytes", file, line}, shared, global, bytes, &barrier);
}
inline void bulk_add(float* sums, const float* terms, uint32_t count, CUDA_HOST_SITE) {
  cuda_host::bulk_add({"bulk_add", file, line}, sums, terms, count);
}
inline void acquire_bulk_turn(const int32_t* turns, int turn, CUDA_HOST_SITE) {
  cuda_host::acquire_turn({"acquire_bulk_turn", file, line}, turns, turn);
}
inline void release_bulk_turn(int32_t* turns, CUDA_HOST_SITE) {
  cuda_host::release_bulk_turn({"release_bulk_turn", file, line}, turns);
}
inline void store_matrices(void* row, const uint32_t (&r)[4], CUDA_HOST_SITE) {
  cuda_host::store_matrices({"store_matrices", file, line}, row, r);
}
template <int kBarrier, int kThreads>
void named_barrier_sync(CUDA_HOST_SITE) {
  cuda_host::meet_named({"named_barrier_sync", file, line}, kBarrier, kThreads);
}
template <int kThreads>
void named_barrier_sync(int barrier, CUDA_HOST_SITE) {
  cuda_host::meet_named({"named_barrier_sync", file, line}, barrier, kThreads);
}

inline uint32_t pack_float8(float x0, float x1, float x2, float x3) {
  uint32_t bits = 0;
  for (const float x : {x3, x2, x1, x0}) bits = bits << 8 | cuda_host::round_to_float8(x);
  return bits;
}
inline uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  return cuda_host::choose_bytes(low, high, selector);
}

template <int kRegisters>
void release_registers(CUDA_HOST_SITE) {
  cuda_host::release_registers({"setmaxnreg.dec", file, line}, kRegisters);
}
template <int kRegisters>
void claim_registers(CUDA_HOST_SITE) {
  cuda_host::claim_registers({"setmaxnreg.inc", file, line}, kRegisters);
}

inline void wgmma_fence(CUDA_HOST_SITE) { cuda_host::wgmma_fence({"wgmma_fence", file, line}); }
inline void wgmma_commit(CUDA_HOST_SITE) { cuda_host::wgmma_commit({"wgmma_commit", file, line}); }

inline void compute_before_wait(float, uint32_t) {}
inline void compute_before_wait(uint32_t, uint32_t) {}

template <class In, int kCount>
void wgmma_shared(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate, CUDA_HOST_SITE) {
  cuda_host::wgmma({"wgmma", file, line},
                   {d, a, b, nullptr, 2 * kCount, accumulate, false, false, cuda_host::widen_element<In>});
}
template <class In, int kCount>
void wgmma_shared_by_rows(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate, CUDA_HOST_SITE) {
  cuda_host::wgmma({"wgmma", file, line},
                   {d, a, b, nullptr, 2 * kCount, accumulate, true, true, cuda_host::widen_element<In>});
}
template <class In, int kCount>
void wgmma_shared_right_by_rows(float (&d)[kCount], uint64_t a, uint64_t b, CUDA_HOST_SITE) {
  cuda_host::wgmma({"wgmma", file, line},
                   {d, a, b, nullptr, 2 * kCount, true, false, true, cuda_host::widen_element<In>});
}
template <class In, int kCount>
void wgmma_registers(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, CUDA_HOST_SITE) {
  cuda_host::wgmma({"wgmma", file, line},
                   {d, 0, b, a, 2 * kCount, true, false, true, cuda_host::widen_element<In>});
}
template <int kCount>
void wgmma_shared_float8(float (&d)[kCount], uint64_t a, uint64_t b, bool accumulate, CUDA_HOST_SITE) {
  cuda_host::wgmma({"wgmma", file, line}, {d, a, b, nullptr, 2 * kCount, accumulate, false, false,
                                           cuda_host::widen_float8, false, 1});
}
template <int kCount>
void wgmma_registers_float8(float (&d)[kCount], const uint32_t (&a)[4], uint64_t b, CUDA_HOST_SITE) {
  cuda_host::wgmma({"wgmma", file, line},
                   {d, 0, b, a, 2 * kCount, true, false, false, cuda_host::widen_float8, false, 1});
}
template <int kPending, int kCount>
void wgmma_wait(float (&)[kCount], CUDA_HOST_SITE) {
  cuda_host::wgmma_wait({"wgmma_wait", file, line}, kPending);
}

}  // namespace flash_attn_ext::cuda::ptx
