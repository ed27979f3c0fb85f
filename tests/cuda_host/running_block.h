// The block that runs: what fibers.cpp, which runs its threads, and blocks.cpp, which runs the launch, both know.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"

namespace cuda_host {

constexpr int kWarpSize = 32, kNamedBarriers = 16;

// Threads that wait for each other.
struct Meeting {
  std::vector<Fiber*> arrived;
};

// A thread that waits until *turns is `turn`, or is no longer `turn`.
struct TurnWaiter {
  Fiber* fiber;
  const int* turns;
  int turn;
  std::string who;
  bool until_changed = false;

  bool may_go_on() const { return (*turns == turn) != until_changed; }
};

// A block that has begun: its threads, and who of them waits for what.
struct RunningBlock {
  int finished = 0;
  std::vector<std::vector<Fiber*>> ready;  // of each warp
  std::vector<int> warp_order;             // whose fibers run first
  Meeting block;
  std::vector<Meeting> warps, warpgroups, named;
  std::vector<TurnWaiter> turns;
  bool steps_aside = false;  // another block goes on before it
};

// What runs now: one launch, of it one block.
struct Execution : RunningBlock {
  void (*enter)(void*);
  void* arguments;
  std::string kernel;
  int threads;
  std::string error;
};

using Fibers = std::vector<std::unique_ptr<Fiber>>;

extern Execution run;
extern Fibers fibers;  // of the block that runs

template <class T>
void shuffle(std::vector<T>& items) {
  for (size_t n = items.size(); n > 1; --n) std::swap(items[n - 1], items[random_below(n)]);
}

std::string text(const Site& site);
void make_ready(Fiber* fiber);
// The one that runs next; null if all wait.
Fiber* next_fiber();
// Runs it until it meets others or ends.
void switch_to(Fiber* fiber);
void switch_to_scheduler();
// All fibers that are left wait: says who waits where.
std::string describe_deadlock();

}  // namespace cuda_host
