#include "fibers.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "hopper.h"
#include "memory.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_host {

Fiber* current = nullptr;

namespace {

uint64_t random_state = 1;

}  // namespace

uint64_t random_below(uint64_t n) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (random_state >> 33) % n;
}

namespace {

constexpr int kWarpSize = 32, kNamedBarriers = 16;

// Threads that wait for each other.
struct Meeting {
  std::vector<Fiber*> arrived;
};

// A thread that waits until *turns is `turn`.
struct TurnWaiter {
  Fiber* fiber;
  const int* turns;
  int turn;
  std::string who;

  bool may_go_on() const { return *turns == turn; }
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

Execution run;
Fibers fibers;             // of the block that runs
std::vector<Fibers> idle;  // reused from block to block
jmp_buf scheduler;

template <class T>
void shuffle(std::vector<T>& items) {
  for (size_t n = items.size(); n > 1; --n) std::swap(items[n - 1], items[random_below(n)]);
}

void make_ready(Fiber* fiber) { run.ready[fiber->thread / kWarpSize].push_back(fiber); }

// One warp runs as far as it can before the next one starts, which is what shows a barrier that is missing;
// in a warp the lanes go in random order.
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

// _setjmp and _longjmp switch between stacks that already run; makecontext only starts one.
void switch_to_scheduler() {
  Fiber* self = current;
  if (_setjmp(self->context) == 0) _longjmp(scheduler, 1);
}

// A fiber's whole life: one block's kernel after the other.
void fiber_loop() {
  for (;;) {
    run.enter(run.arguments);
    current->finished = true;
    ++run.finished;
    switch_to_scheduler();
  }
}

void switch_to(Fiber* fiber) {
  current = fiber;
  threadIdx = fiber->index;
  if (_setjmp(scheduler) == 0) {
    if (fiber->started) _longjmp(fiber->context, 1);
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

// Everything that any of them did before is now known to all of them.
void join_clocks(const std::vector<Fiber*>& fibers) {
  const auto joined = std::make_shared<Clock>(*fibers[0]->known);
  const Clock* last = nullptr;
  for (const Fiber* fiber : fibers) {
    if (fiber->known.get() != last) {  // threads that met before share one clock
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

// Waits until `expected` threads are here. The last one finishes the meeting for all of them.
template <class Finish>
void meet(Meeting& meeting, size_t expected, Site site, Finish finish) {
  Fiber* self = current;
  self->site = site;
  if (!meeting.arrived.empty()) {
    const Site& first = meeting.arrived[0]->site;
    if (first.line != site.line || std::strcmp(first.file, site.file) != 0)
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

// All fibers that are left wait: says who waits where.
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

void begin_block(dim3 block, size_t shared_bytes) {
  blockIdx = block;
  static_cast<RunningBlock&>(run) = {};
  run.named.assign(kNamedBarriers, {});
  const int warps = (run.threads + kWarpSize - 1) / kWarpSize;
  memory_begin_block(shared_bytes);
  run.warps.assign(warps, {});
  run.warpgroups.assign((warps + 3) / 4, {});
  run.ready.assign(warps, {});
  run.warp_order.resize(warps);
  std::iota(run.warp_order.begin(), run.warp_order.end(), 0);
  shuffle(run.warp_order);
  const auto nothing_known = std::make_shared<const Clock>(run.threads + kMaxAsyncWriters, 0);
  hopper_begin_block(run.threads);
  if (!idle.empty()) {
    fibers = std::move(idle.back());
    idle.pop_back();
  }
  while (fibers.size() < static_cast<size_t>(run.threads)) {
    fibers.push_back(std::make_unique<Fiber>());
    fibers.back()->stack = std::make_unique<char[]>(kStackBytes);
  }
  for (int n = 0; n < run.threads; ++n) {
    Fiber& fiber = *fibers[n];
    const dim3 size = blockDim;
    fiber.thread = n;
    fiber.index = dim3(n % size.x, n / size.x % size.y, n / (size.x * size.y));
    fiber.finished = false;
    fiber.site = {};
    fiber.now = 1;
    fiber.copies.clear();
    fiber.groups = 0;
    fiber.known = nothing_known;
    make_ready(&fiber);
  }
}

// What the block's threads have left undone; empty if nothing.
std::string what_is_in_flight() {
  for (int n = 0; n < run.threads; ++n)
    if (!fibers[n]->copies.empty())
      return "the block ended before a copy by cp.async had been waited for: " + describe(n);
  return hopper_end_block();
}

// Whether some thread's turn has come.
bool wake_for_turns() {
  const auto come = std::stable_partition(run.turns.begin(), run.turns.end(),
                                          [](const TurnWaiter& waiter) { return !waiter.may_go_on(); });
  const bool wakes = come != run.turns.end();
  for (auto waiter = come; waiter != run.turns.end(); ++waiter) wake(waiter->fiber);
  run.turns.erase(come, run.turns.end());
  return wakes;
}

// A fiber runs until it meets others. Returns whether the block has ended; if not, another one must go on
// first. A block's end is strict: its shared memory goes to the next block, so nothing may still be on its way
// there.
bool run_block() {
  while (run.error.empty() && !run.steps_aside && run.finished < run.threads) {
    Fiber* next = next_fiber();
    if (next) {
      switch_to(next);
    } else if (!wake_for_turns() && !hopper_land_one()) {
      break;  // what is asynchronous comes as late as it may: when all threads wait
    }
  }
  if (!run.error.empty()) return true;
  if (std::exchange(run.steps_aside, false)) return false;
  if (run.finished == run.threads) {
    run.error = what_is_in_flight();
  } else if (!run.turns.empty()) {
    return false;
  } else {
    run.error = describe_deadlock();
  }
  return true;
}

void give_back(Fibers set) {
  if (!run.error.empty())
    for (auto& fiber : set) fiber->started = false;  // left in the middle of the kernel
  idle.push_back(std::move(set));
}

// A block that has begun and does not run now.
struct ResidentBlock {
  dim3 index;
  RunningBlock state;
  Fibers its_fibers;
  std::shared_ptr<void> memory, hopper;

  static ResidentBlock leave() {
    return {blockIdx, std::move(static_cast<RunningBlock&>(run)), std::move(fibers), memory_leave_block(),
            hopper_leave_block()};
  }
  void enter() {
    blockIdx = index;
    static_cast<RunningBlock&>(run) = std::move(state);
    fibers = std::move(its_fibers);
    memory_enter_block(memory);
    hopper_enter_block(hopper);
  }
  bool may_go_on() const {
    return state.turns.empty() ||
           std::any_of(state.turns.begin(), state.turns.end(), std::mem_fn(&TurnWaiter::may_go_on));
  }
};

// So many blocks may have begun and not ended, as on a GPU with so many multiprocessors.
constexpr size_t kMostResident = 3;

// Blocks begin in this order. One runs until it ends, waits for its turn or steps aside; who goes on then is
// drawn.
void run_blocks(const std::vector<dim3>& order, size_t shared_bytes) {
  std::vector<ResidentBlock> resident;
  size_t begun = 0;
  while (run.error.empty() && (begun < order.size() || !resident.empty())) {
    std::vector<size_t> may_go_on;
    for (size_t n = 0; n < resident.size(); ++n)
      if (resident[n].may_go_on()) may_go_on.push_back(n);
    const bool may_begin = begun < order.size() && resident.size() < kMostResident;
    if (may_go_on.empty() && !may_begin) {
      const TurnWaiter& first = resident[0].state.turns[0];
      run.error = "deadlock: waits for turn " + std::to_string(first.turn) + ", it is turn " +
                  std::to_string(*first.turns) + ": " + first.who;
      break;
    }
    const size_t chosen = random_below(may_go_on.size() + may_begin);
    if (chosen < may_go_on.size()) {
      ResidentBlock block = std::move(resident[may_go_on[chosen]]);
      resident.erase(resident.begin() + may_go_on[chosen]);
      block.enter();
    } else {
      begin_block(order[begun++], shared_bytes);
    }
    if (run_block()) {
      give_back(std::move(fibers));
    } else {
      resident.push_back(ResidentBlock::leave());
    }
  }
  for (ResidentBlock& block : resident) give_back(std::move(block.its_fibers));
}

std::string name_of(const void* kernel) {
  Dl_info info;
  if (!dladdr(kernel, &info) || !info.dli_sname) return "kernel";
  int status;
  char* demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  const std::string name = status == 0 ? demangled : info.dli_sname;
  std::free(demangled);
  return name.substr(0, name.find('('));
}

std::map<const void*, int> dynamic_shared_limit;  // set by cudaFuncSetAttribute
int64_t attributes_set = 0;

}  // namespace

void fail(const std::string& message) {
  run.error = message;
  _longjmp(scheduler, 1);
}

std::string describe(int thread) {
  const dim3 b = blockIdx;
  return run.kernel + ", block (" + std::to_string(b.x) + ", " + std::to_string(b.y) + ", " +
         std::to_string(b.z) + "), thread " + std::to_string(thread);
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

void step_aside() {
  if (random_below(2) == 0) return;
  run.steps_aside = true;
  pause();
}

void wait_until_turn(Site site, const int* turns, int turn) {
  if (*turns == turn) return;
  current->site = site;
  run.turns.push_back({current, turns, turn, text(site) + ", " + describe(current->thread)});
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
  meet(run.block, run.threads, site, [](const std::vector<Fiber*>& fibers) {
    uint64_t all = 0;
    for (const Fiber* fiber : fibers) all |= fiber->value;
    for (Fiber* fiber : fibers) fiber->value = all;
    join_clocks(fibers);
    shuffle(run.warp_order);
  });
  return self->value;
}

void meet_named(Site site, int barrier, int threads) {
  if (barrier <= 0 || barrier >= kNamedBarriers || threads % kWarpSize != 0)
    fail("a named barrier is 1 to 15, for whole warps: " + text(site) + ", " + describe(current->thread));
  meet(run.named[barrier], threads, site, [](const std::vector<Fiber*>& fibers) {
    join_clocks(fibers);
    shuffle(run.warp_order);
  });
}

void meet_warp(Site site, unsigned mask) {
  meet(run.warps[current->thread / kWarpSize], __builtin_popcount(mask), site, join_clocks);
}

void combine_lanes(Site site, unsigned mask, void* mine, void (*finish)(void* const* lanes)) {
  current->brought = mine;
  Meeting& warp = run.warps[current->thread / kWarpSize];
  meet(warp, __builtin_popcount(mask), site, [finish](const std::vector<Fiber*>& fibers) {
    void* lanes[kWarpSize] = {};
    for (const Fiber* fiber : fibers) lanes[fiber->thread % kWarpSize] = fiber->brought;
    Fiber* last =
        std::exchange(current, nullptr);  // the host's work, on all lanes' stacks: nothing to look at
    finish(lanes);
    current = last;
  });
}

// Blocks begin in random order. They run one after another, except where they take turns.
cudaError_t run_grid(const cudaLaunchConfig_t& config, const void* kernel, void (*enter)(void*),
                     void* arguments, size_t argument_bytes) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  constexpr size_t kSharedBytesWithoutOptIn = 48 << 10;
  const auto limit = dynamic_shared_limit.find(kernel);
  const size_t allowed = limit == dynamic_shared_limit.end() ? kSharedBytesWithoutOptIn : limit->second;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535 ||
      threads == 0 || threads > 1024 || config.dynamicSmemBytes > std::max(allowed, kSharedBytesWithoutOptIn))
    return cudaErrorInvalidConfiguration;

  run.enter = enter;
  run.arguments = arguments;
  run.kernel = name_of(kernel);
  run.threads = static_cast<int>(threads);
  blockDim = block;
  gridDim = grid;
  memory_begin_launch(arguments, argument_bytes);

  std::vector<dim3> order;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) order.emplace_back(x, y, z);
  shuffle(order);
  run_blocks(order, config.dynamicSmemBytes);
  return run.error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace cuda_host

void __trap() { cuda_host::fail("trap: " + cuda_host::describe(cuda_host::current->thread)); }

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  return cuda_host::set_buffer(data, value, bytes) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  ++cuda_host::attributes_set;
  if (value < 0 || static_cast<size_t>(value) > cuda_host::kMaxSharedBytes) return cudaErrorInvalidValue;
  cuda_host::dynamic_shared_limit[kernel] = value;
  return cudaSuccess;
}

extern "C" int64_t attributes_set() { return cuda_host::attributes_set; }
