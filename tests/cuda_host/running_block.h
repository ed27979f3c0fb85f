// The running block, or the running blocks of a cluster. fibers.cpp runs the threads, and blocks.cpp runs the launch. A block
// without a cluster is a cluster of one block.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fibers.h"

namespace cuda_host {

constexpr int kWarpSize = 32, kNamedBarriers = 16;
constexpr unsigned kAllLanes = 0xffffffffu;

// Threads that wait for each other.
struct Meeting {
  std::vector<Fiber*> arrived;
};

// A thread that waits until *turns is `turn`, or until it is no longer `turn`.
struct TurnWaiter {
  Fiber* fiber;
  const int* turns;
  int turn;
  std::string who;
  bool until_changed = false;

  bool may_go_on() const { return (*turns == turn) != until_changed; }
};

// A block that has begun, or a cluster: its threads, and for each waiting thread the reason.
struct RunningBlock {
  int finished = 0;
  std::vector<std::vector<Fiber*>> ready;  // of each warp
  std::vector<int> warp_order;             // the order in which warps run
  Meeting cluster;
  std::vector<Meeting> blocks, warps, warpgroups, named;
  std::vector<TurnWaiter> turns;
  bool steps_aside = false;  // another block continues before it
};

// The running launch and its running block.
struct Execution : RunningBlock {
  void (*enter)(void*);
  void* arguments;
  std::string kernel;
  int threads;  // of a cluster
  int threads_of_block, ranks;
  std::string error;
};

using Fibers = std::vector<std::unique_ptr<Fiber>>;

extern Execution run;
extern Fibers fibers;  // of the running block

template <class T>
void shuffle(std::vector<T>& items) {
  for (size_t n = items.size(); n > 1; --n) std::swap(items[n - 1], items[random_below(n)]);
}

std::string text(const Site& site);
void make_ready(Fiber* fiber);
// The next fiber to run; null if all wait.
Fiber* next_fiber();
// Runs a fiber until its next barrier or its end.
void switch_to(Fiber* fiber);
void switch_to_scheduler();
// All remaining fibers wait: returns a text with the place where each of them waits.
std::string describe_deadlock();

}  // namespace cuda_host
