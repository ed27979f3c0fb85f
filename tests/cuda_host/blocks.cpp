// The blocks of a launch: chooses the running block, and sets a block aside while it waits for another block.
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>

#include "capture.h"
#include "hopper.h"
#include "memory.h"
#include "running_block.h"

namespace cuda_host {

namespace {

std::vector<Fibers> idle;  // reused from block to block

// Begins a cluster: `block` and the blocks after it along x.
void begin_cluster(dim3 block, size_t shared_bytes) {
  static_cast<RunningBlock&>(run) = {};
  run.blocks.assign(run.ranks, {});
  run.named.assign(kNamedBarriers * run.ranks, {});
  const int warps = (run.threads + kWarpSize - 1) / kWarpSize;
  memory_begin_cluster(shared_bytes, run.ranks);
  run.warps.assign(warps, {});
  run.warpgroups.assign((warps + 3) / 4, {});
  run.ready.assign(warps, {});
  run.warp_order.resize(warps);
  std::iota(run.warp_order.begin(), run.warp_order.end(), 0);
  shuffle(run.warp_order);
  const auto nothing_known = std::make_shared<const Clock>(run.threads + kMaxAsyncWriters * run.ranks, 0);
  hopper_begin_block(run.threads, run.ranks);
  if (!idle.empty()) {
    fibers = std::move(idle.back());
    idle.pop_back();
  }
  while (fibers.size() < static_cast<size_t>(run.threads)) {
    fibers.push_back(std::make_unique<Fiber>());
    fibers.back()->stack.reset(new char[kStackBytes]);  // uninitialised, so that only used pages need memory
  }
  for (int n = 0; n < run.threads; ++n) {
    Fiber& fiber = *fibers[n];
    const dim3 size = blockDim;
    const int t = n % run.threads_of_block;
    fiber.thread = n;
    fiber.index = dim3(t % size.x, t / size.x % size.y, t / (size.x * size.y));
    fiber.block = dim3(block.x + rank_of(n), block.y, block.z);
    fiber.finished = false;
    fiber.arrived_at_cluster = false;
    fiber.site = {};
    fiber.now = 1;
    fiber.copies.clear();
    fiber.groups = 0;
    fiber.acquired_from = nullptr;
    fiber.known = nothing_known;
    make_ready(&fiber);
  }
}

// A text that names the unfinished work of the block's threads; empty if there is none.
std::string what_is_in_flight() {
  for (int n = 0; n < run.threads; ++n)
    if (!fibers[n]->copies.empty())
      return "the block ended before a copy by cp.async had been waited for: " + describe(n);
  return hopper_end_block([](int rank, int writer, uint32_t time) {
    const auto first = fibers.begin() + rank * run.threads_of_block;
    return std::any_of(first, first + run.threads_of_block,
                       [&](const auto& fiber) { return time <= (*fiber->known)[writer]; });
  });
}

// Whether a thread that waits for its turn may continue.
bool wake_for_turns() {
  const auto come = std::stable_partition(run.turns.begin(), run.turns.end(),
                                          [](const TurnWaiter& waiter) { return !waiter.may_go_on(); });
  const bool wakes = come != run.turns.end();
  for (auto waiter = come; waiter != run.turns.end(); ++waiter) wake(waiter->fiber);
  run.turns.erase(come, run.turns.end());
  return wakes;
}

// Runs the fibers in turn, each until its next barrier. Returns whether the block has ended. If not, another block must
// continue first. At the end no write to shared memory may be in flight, because the next block gets this memory.
bool run_block() {
  while (run.error.empty() && !run.steps_aside && run.finished < run.threads) {
    Fiber* next = next_fiber();
    if (next) {
      switch_to(next);
    } else if (!wake_for_turns() && !hopper_land_one()) {
      break;  // asynchronous work completes as late as possible: when all threads wait
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
  RunningBlock state;
  Fibers its_fibers;
  std::shared_ptr<void> memory, hopper;

  static ResidentBlock leave() {
    return {std::move(static_cast<RunningBlock&>(run)), std::move(fibers), memory_leave_block(),
            hopper_leave_block()};
  }
  void enter() {
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

// The maximum number of blocks that have begun and not ended: as on a GPU with this number of multiprocessors.
constexpr size_t kMostResident = 3;

// Blocks begin in this order. A block runs until it ends, waits for its turn or is set aside. Then a random block
// continues.
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
      begin_cluster(order[begun++], shared_bytes);
    }
    if (run_block()) {
      give_back(std::move(fibers));
    } else {
      resident.push_back(ResidentBlock::leave());
    }
  }
  for (ResidentBlock& block : resident) give_back(std::move(block.its_fibers));
}

struct Translated {
  void (*run)(const unsigned char* params);
  size_t param_bytes;  // in PTX
  int64_t launches = 0;
};
std::map<std::string, Translated> translated_kernels;  // by mangled name

std::string name_of(const void* kernel) {
  Dl_info info;
  if (!dladdr(kernel, &info) || !info.dli_sname) return "kernel";
  int status;
  char* demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  const std::string name = status == 0 ? demangled : info.dli_sname;
  std::free(demangled);
  return name.substr(0, name.find('(')) + (find_translated(kernel) ? " (PTX)" : "");
}

std::map<const void*, int> dynamic_shared_limit;  // set by cudaFuncSetAttribute
int64_t attributes_set = 0;

void refuse_in_a_cluster() {
  if (run.ranks > 1) fail("turns of the blocks of a cluster are not modelled: " + describe(current->thread));
}

}  // namespace

void step_aside() {
  refuse_in_a_cluster();
  if (random_below(2) == 0) return;
  run.steps_aside = true;
  pause();
}

void wait_until_turn(Site site, const int* turns, int turn) {
  refuse_in_a_cluster();
  if (*turns == turn) return;
  current->site = site;
  run.turns.push_back({current, turns, turn, text(site) + ", " + describe(current->thread)});
  switch_to_scheduler();
}

void wait_until_changed(Site site, const int* turns, int turn) {
  refuse_in_a_cluster();
  if (*turns != turn) return;
  current->site = site;
  run.turns.push_back({current, turns, turn, text(site) + ", " + describe(current->thread), true});
  switch_to_scheduler();
}

void (*find_translated(const void* kernel))(const unsigned char*) {
  Dl_info info;
  if (translated_kernels.empty() || !dladdr(kernel, &info) || !info.dli_sname) return nullptr;
  const auto found = translated_kernels.find(info.dli_sname);
  return found == translated_kernels.end() ? nullptr : found->second.run;
}

namespace {

// False if the PTX declares other parameters: the host and nvcc must lay out structs alike.
bool count_launch(const void* arguments) {
  const auto* launched = static_cast<const TranslatedKernel*>(arguments);
  for (auto& [name, kernel] : translated_kernels)
    if (kernel.run == launched->run && kernel.param_bytes == launched->bytes) return ++kernel.launches > 0;
  return false;
}

// The blocks of a cluster. 0: a cluster that is not along x.
int cluster_blocks(const cudaLaunchConfig_t& config) {
  int blocks = 1;
  for (unsigned n = 0; n < config.numAttrs; ++n) {
    const auto& [id, val] = config.attrs[n];
    if (id != cudaLaunchAttributeClusterDimension) continue;
    blocks = val.clusterDim.y == 1 && val.clusterDim.z == 1 ? static_cast<int>(val.clusterDim.x) : 0;
  }
  return blocks;
}

}  // namespace

// Blocks begin in random order. They run one after another, except blocks that take turns.
cudaError_t run_grid(const cudaLaunchConfig_t& config, const void* kernel, void (*enter)(void*),
                     void* arguments, size_t argument_bytes) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  constexpr size_t kSharedBytesWithoutOptIn = 48 << 10;
  const auto limit = dynamic_shared_limit.find(kernel);
  const size_t allowed = limit == dynamic_shared_limit.end() ? kSharedBytesWithoutOptIn : limit->second;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 || grid.z > 65535 ||
      threads == 0 || threads > 1024 ||
      config.dynamicSmemBytes > std::max(allowed, kSharedBytesWithoutOptIn) ||
      config.dynamicSmemBytes > most_shared_bytes())
    return cudaErrorInvalidConfiguration;
  const int ranks = cluster_blocks(config);
  if (ranks < 1 || ranks > kMostRanks || grid.x % ranks != 0) return cudaErrorInvalidConfiguration;
  if (record([=, copy = copy_arguments(arguments, argument_bytes)] {
        cudaLaunchAttribute cluster{cudaLaunchAttributeClusterDimension,
                                    {{static_cast<unsigned>(ranks), 1, 1}}};
        cudaLaunchConfig_t again = config;
        again.attrs = &cluster;
        again.numAttrs = 1;
        return run_grid(again, kernel, enter, copy.get(), argument_bytes);
      }))
    return cudaSuccess;
  if (find_translated(kernel) && !count_launch(arguments)) return cudaErrorInvalidValue;

  run.enter = enter;
  run.arguments = arguments;
  run.kernel = name_of(kernel);
  run.ranks = ranks;
  run.threads_of_block = static_cast<int>(threads);
  run.threads = run.threads_of_block * ranks;
  blockDim = block;
  gridDim = grid;
  memory_begin_launch(arguments, argument_bytes);

  std::vector<dim3> order;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += ranks) order.emplace_back(x, y, z);
  shuffle(order);
  run_blocks(order, config.dynamicSmemBytes);
  return run.error.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace cuda_host

void __trap() { cuda_host::fail("trap: " + cuda_host::describe(cuda_host::current->thread)); }

cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  if (cuda_host::record([=] { return cudaMemsetAsync(data, value, bytes, stream); })) return cudaSuccess;
  return cuda_host::set_buffer(data, value, bytes) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  ++cuda_host::attributes_set;
  if (value < 0 || static_cast<size_t>(value) > cuda_host::most_shared_bytes()) return cudaErrorInvalidValue;
  cuda_host::dynamic_shared_limit[kernel] = value;
  return cudaSuccess;
}

extern "C" void forget_translated() { cuda_host::translated_kernels.clear(); }
extern "C" void add_translated(const char* mangled, void (*run)(const unsigned char*), size_t param_bytes) {
  cuda_host::translated_kernels[mangled] = {run, param_bytes};
}
// Of one kernel, or of all for an empty name.
extern "C" int64_t translated_launches(const char* mangled) {
  int64_t launches = 0;
  for (const auto& [name, kernel] : cuda_host::translated_kernels)
    if (!*mangled || name == mangled) launches += kernel.launches;
  return launches;
}

extern "C" int64_t attributes_set() { return cuda_host::attributes_set; }
