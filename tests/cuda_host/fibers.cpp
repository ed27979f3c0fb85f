#include "fibers.h"

#include <ucontext.h>

#include <algorithm>
#include <map>
#include <utility>

#include "memory.h"
#include "running_block.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_host {

Fiber* current = nullptr;
Execution run;
Fibers fibers;

namespace {

uint64_t random_state = 1;

}  // namespace

uint64_t random_below(uint64_t n) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<uint32_t>(random_state >> 33) % static_cast<uint32_t>(n);  // 32 bits divide faster
}

namespace {

void* scheduler[5];  // of __builtin_setjmp

}  // namespace

void make_ready(Fiber* fiber) { run.ready[fiber->thread / kWarpSize].push_back(fiber); }

// A warp runs as far as it can before the next warp starts: so a missing barrier shows. The lanes of a warp run in random
// order.
Fiber* next_fiber() {
  for (const int warp : run.warp_order) {
    std::vector<Fiber*>& lanes = run.ready[warp];
    if (lanes.empty()) continue;
    std::swap(lanes[random_below(lanes.size())], lanes.back());
    Fiber* next = lanes.back();
    lanes.pop_back();
    return next;
  }
  return nullptr;
}

namespace {

// Switches between stacks that already run, faster than the longjmp of libc. makecontext only starts a stack.
// noipa: otherwise the compiler removes the code after __builtin_setjmp as unreachable.
[[gnu::noipa]] void go_on_at(void** context) { __builtin_longjmp(context, 1); }

}  // namespace

[[gnu::noinline]] void switch_to_scheduler() {
  Fiber* self = current;
  if (__builtin_setjmp(self->context) == 0) go_on_at(scheduler);
}

int rank_of(int thread) { return thread / run.threads_of_block; }

namespace {

void end_cluster_meeting_if_complete();

// The function of a fiber: it runs the kernel of one block after the other.
void fiber_loop() {
  for (;;) {
    run.enter(run.arguments);
    current->finished = true;
    ++run.finished;
    end_cluster_meeting_if_complete();
    switch_to_scheduler();
  }
}

}  // namespace

[[gnu::noinline]] void switch_to(Fiber* fiber) {
  current = fiber;
  threadIdx = fiber->index;
  blockIdx = fiber->block;
  memory_enter_rank(rank_of(fiber->thread));
  if (__builtin_setjmp(scheduler) == 0) {
    if (fiber->started) go_on_at(fiber->context);
    fiber->started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber->stack.get();
    context.uc_stack.ss_size = kStackBytes;
    context.uc_link = nullptr;
    makecontext(&context, fiber_loop, 0);
    setcontext(&context);
  }
  current = nullptr;
}

std::string text(const Site& site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(site.what) + " at " + (name ? name + 1 : site.file) + ":" + std::to_string(site.line);
}

namespace {

// Each thread now knows all earlier events of all threads.
void join_clocks(const std::vector<Fiber*>& fibers) {
  const auto joined = std::make_shared<Clock>(*fibers[0]->known);
  const Clock* last = nullptr;
  for (const Fiber* fiber : fibers) {
    if (fiber->known.get() != last) {  // threads that met before already share a clock
      last = fiber->known.get();
      for (size_t n = 0; n < joined->size(); ++n) (*joined)[n] = std::max((*joined)[n], (*last)[n]);
    }
  }
  for (const Fiber* fiber : fibers) (*joined)[fiber->thread] = fiber->now;
  for (Fiber* fiber : fibers) {
    fiber->known = joined;
    ++fiber->now;
  }
}

// Waits until `expected` threads have arrived. The last thread finishes the barrier for all.
template <class Finish>
void meet(Meeting& meeting, size_t expected, Site site, Finish finish) {
  Fiber* self = current;
  self->site = site;
  if (!meeting.arrived.empty()) {
    const Site& first = meeting.arrived[0]->site;
    if (first.line != site.line || (first.file != site.file && std::strcmp(first.file, site.file) != 0))
      fail("divergent barrier: " + describe(self->thread) + " is in " + text(site) + ", thread " +
           std::to_string(meeting.arrived[0]->thread) + " in " + text(first));
  }
  meeting.arrived.push_back(self);
  if (meeting.arrived.size() == expected) {
    finish(meeting.arrived);
    for (Fiber* fiber : meeting.arrived) {
      fiber->site = {};
      make_ready(fiber);
    }
    meeting.arrived.clear();
  }
  switch_to_scheduler();
}

}  // namespace

std::string describe_deadlock() {
  std::map<std::string, std::vector<int>> waiting;
  for (int n = 0; n < run.threads; ++n)
    waiting[fibers[n]->finished ? "has ended" : "waits in " + text(fibers[n]->site)].push_back(n);
  std::string message = "deadlock in " + run.kernel + ":";
  for (const auto& [where, threads] : waiting) {
    message += " thread " + std::to_string(threads[0]);
    if (threads.size() > 1) message += " and " + std::to_string(threads.size() - 1) + " more";
    message += " " + where + ";";
  }
  return message;
}

void fail(const std::string& message) {
  run.error = message;
  __builtin_longjmp(scheduler, 1);
}

std::string describe(int thread) {
  const dim3 b = fibers[thread]->block;
  return run.kernel + ", block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " +
         std::to_string(b.z) + "), thread " + std::to_string(thread % run.threads_of_block);
}

void seed_order(uint64_t seed) { random_state = seed * 2 + 1; }

std::string last_kernel() { return run.kernel; }

std::string take_error() { return std::exchange(run.error, ""); }

void wait_to_be_woken(Site site) {
  current->site = site;
  switch_to_scheduler();
}

void wake(Fiber* fiber) {
  fiber->site = {};
  make_ready(fiber);
}

void pause() {
  make_ready(current);
  switch_to_scheduler();
}

void meet_warpgroup(Site site, const std::function<void(const std::vector<Fiber*>&)>& finish) {
  constexpr int kThreads = 128;
  meet(run.warpgroups[current->thread / kThreads], kThreads, site, finish);
}

void shuffle_warps() { shuffle(run.warp_order); }

int lane() { return current->thread % kWarpSize; }

uint64_t meet_block(Site site, uint64_t value) {
  Fiber* self = current;
  self->value = value;
  meet(run.blocks[rank_of(self->thread)], run.threads_of_block, site, [](const std::vector<Fiber*>& fibers) {
    uint64_t all = 0;
    for (const Fiber* fiber : fibers) all |= fiber->value;
    for (Fiber* fiber : fibers) fiber->value = all;
    join_clocks(fibers);
    shuffle(run.warp_order);
  });
  return self->value;
}

void cluster_arrive(Site site) {
  if (std::exchange(current->arrived_at_cluster, true))
    fail("arrives at the barrier of the cluster twice: " + text(site) + ", " + describe(current->thread));
}

// The barrier of a cluster has no number: threads may meet at different lines. Threads that have ended count as arrived.
void cluster_wait(Site site) {
  if (!std::exchange(current->arrived_at_cluster, false))
    fail("waits at the barrier of the cluster without an arrival: " + text(site) + ", " +
         describe(current->thread));
  current->site = site;
  run.cluster.arrived.push_back(current);
  end_cluster_meeting_if_complete();
  switch_to_scheduler();
}

namespace {

void end_cluster_meeting_if_complete() {
  std::vector<Fiber*>& arrived = run.cluster.arrived;
  if (arrived.empty() || arrived.size() + run.finished < static_cast<size_t>(run.threads)) return;
  join_clocks(arrived);
  for (Fiber* fiber : arrived) wake(fiber);
  arrived.clear();
  shuffle(run.warp_order);
}

}  // namespace

void meet_named(Site site, int barrier, int threads) {
  if (barrier <= 0 || barrier >= kNamedBarriers || threads % kWarpSize != 0)
    fail("a named barrier is 1 to 15, for whole warps: " + text(site) + ", " + describe(current->thread));
  meet(run.named[rank_of(current->thread) * kNamedBarriers + barrier], threads, site,
       [](const std::vector<Fiber*>& fibers) {
         join_clocks(fibers);
         shuffle(run.warp_order);
       });
}

namespace {

// The lanes of a mask meet. Each of them must be in the mask, and name the same mask.
template <class Finish>
void meet_lanes(Site site, unsigned mask, Finish finish) {
  Meeting& warp = run.warps[current->thread / kWarpSize];
  if ((mask >> lane() & 1) == 0)
    fail("a lane is not in its own mask: " + text(site) + ", " + describe(current->thread));
  if (!warp.arrived.empty() && warp.arrived[0]->mask != mask)
    fail("the lanes of a warp meet with different masks: " + text(site) + ", " + describe(current->thread));
  current->mask = mask;
  meet(warp, __builtin_popcount(mask), site, finish);
}

}  // namespace

void align_warp(Site site) {
  meet_lanes(site, kAllLanes, [](const std::vector<Fiber*>&) {});
}

void meet_warp(Site site, unsigned mask) { meet_lanes(site, mask, join_clocks); }

void refuse_source_lane(Site site, int source) {
  fail("a lane reads lane " + std::to_string(source) + ", which is not in the mask: " + text(site) + ", " +
       describe(current->thread));
}

void combine_lanes(Site site, unsigned mask, void* mine, void (*finish)(void* const* lanes)) {
  current->brought = mine;
  meet_lanes(site, mask, [finish](const std::vector<Fiber*>& fibers) {
    void* lanes[kWarpSize] = {};
    for (const Fiber* fiber : fibers) lanes[fiber->thread % kWarpSize] = fiber->brought;
    Fiber* last = std::exchange(current, nullptr);  // the accesses of the model itself are not checked
    finish(lanes);
    current = last;
  });
}

}  // namespace cuda_host
