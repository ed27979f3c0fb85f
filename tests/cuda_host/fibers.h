// One fiber for each CUDA thread of the running block. Vector clocks order the writes of the fibers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "include/cuda_runtime.h"

namespace cuda_host {

// A vector clock. The events of a thread happen at its time `now`, which advances at each barrier.
using Clock = std::vector<uint32_t>;  // element t: the latest known time of thread t

struct Fiber {
  int thread;  // its number in the cluster
  dim3 index, block;
  std::unique_ptr<char[]> stack;
  void* context[5];      // of __builtin_setjmp
  bool started = false;  // the context is inside the fiber's loop, and can be switched to

  bool finished = false;
  Site site{};         // where it waits
  uint64_t value = 0;  // for meet_block
  bool arrived_at_cluster = false;
  void* brought = nullptr;  // for combine_lanes
  unsigned mask = 0;        // of the lanes that it meets
  uint32_t now = 1;
  std::shared_ptr<const Clock> known;

  // Copies by cp.async that have not landed: it has ended `groups` groups of them.
  struct Copy {
    void* shared;
    const void* global;
    size_t bytes;
    bool inside;
    int group;
  };
  std::vector<Copy> copies;
  int groups = 0;

  // The last number that it read by acquire_number(), and where.
  const int* acquired_from = nullptr;
  int acquired = 0;

  // Whether the event of `other` at `time` is ordered before the next event of this thread.
  bool knows(int other, uint32_t time) const { return other == thread || time <= (*known)[other]; }
};

// Clocks have one entry for each thread of the cluster, and then one for each asynchronous writer: the barriers of
// hopper_barriers.cpp. kMaxAsyncWriters: of a block.
constexpr int kMaxAsyncWriters = 32;

int rank_of(int thread);  // the number of a thread's block in its cluster

constexpr size_t kStackBytes = 256 << 10;  // kernels of tests/ptx keep thousands of registers there

extern Fiber* current;  // null while no kernel runs

// For the files hopper_*.cpp: a thread waits until another thread wakes it. The 128 threads of a warpgroup meet,
// without an order of memory, and the last thread calls finish(all threads). A last function changes the order of the
// warps.
void wait_to_be_woken(Site site);
void wake(Fiber* fiber);
void pause();  // lets other threads run first
// For blocks that take turns. Lets other blocks begin or continue before this block. Then this thread waits until
// *turns is `turn`.
void step_aside();
void wait_until_turn(Site site, const int* turns, int turn);
void wait_until_changed(Site site, const int* turns, int turn);  // waits until *turns is not `turn`
void align_warp(Site site);  // the threads of the warp meet, without an order of memory
void meet_warpgroup(Site site, const std::function<void(const std::vector<Fiber*>&)>& finish);
void shuffle_warps();
uint64_t random_below(uint64_t n);
// Ends the launch with this message. Only the running fiber calls it, and it never returns.
[[noreturn]] void fail(const std::string& message);

std::string describe(int thread);  // "kernel<...>, block (0, 1, 0), thread 7"

void seed_order(uint64_t seed);
std::string last_kernel();  // the name of the last launched kernel
// The first error since the last call, or an empty string.
std::string take_error();

}  // namespace cuda_host
