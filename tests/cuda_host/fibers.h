// One fiber per CUDA thread of the block that runs, and when the fibers learned of each other's writes.
#pragma once

#include <csetjmp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "include/cuda_runtime.h"

namespace cuda_host {

// Vector clocks: a thread's events happen at its own time `now`, which advances when it meets others.
using Clock = std::vector<uint32_t>;  // the latest time of each thread that is known to have passed

struct Fiber {
  int thread;  // its number in the block
  dim3 index;
  std::unique_ptr<char[]> stack;
  jmp_buf context;
  bool started = false;  // the context is inside the fiber's loop, and can be switched to

  bool finished = false;
  Site site{};              // where it waits
  uint64_t value = 0;       // for meet_block
  void* brought = nullptr;  // for combine_lanes
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

  // Whether what `other` did at `time` is ordered before what this thread does now.
  bool knows(int other, uint32_t time) const { return other == thread || time <= (*known)[other]; }
};

// Clocks have entries behind the threads', for what writes to memory on its own: hopper.cpp's barriers.
constexpr int kMaxAsyncWriters = 32;

constexpr size_t kStackBytes = 256 << 10;  // kernels of tests/ptx keep thousands of registers there

extern Fiber* current;  // null while no kernel runs

// For hopper.cpp: a thread waits until another one wakes it; the 128 threads of a warpgroup meet, which
// orders no memory, and the last one calls `finish` with all of them; warps take turns in another order from
// now on.
void wait_to_be_woken(Site site);
void wake(Fiber* fiber);
void pause();  // others may run first
// For blocks that take turns: others may begin or go on before this one; and this thread waits until *turns is
// `turn`.
void step_aside();
void wait_until_turn(Site site, const int* turns, int turn);
void wait_until_changed(Site site, const int* turns, int turn);  // until it is not `turn`
void align_warp(Site site);  // the warp's threads meet, which orders no memory
void meet_warpgroup(Site site, const std::function<void(const std::vector<Fiber*>&)>& finish);
void shuffle_warps();
uint64_t random_below(uint64_t n);
// Ends the launch with this message; called by the fiber that runs, to which it never returns.
[[noreturn]] void fail(const std::string& message);

std::string describe(int thread);  // "kernel<...>, block (0, 1, 0), thread 7"

void seed_order(uint64_t seed);
std::string last_kernel();  // the name of the one launched last
// The first error since the last call, or an empty string.
std::string take_error();

}  // namespace cuda_host
