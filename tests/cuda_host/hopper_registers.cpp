// setmaxnreg as the PTX manual defines it. A block starts with the same number of registers for each thread. A warpgroup
// returns registers to the pool of the block, or waits until the pool has enough.
#include "hopper_block.h"

namespace cuda_host {
namespace {

constexpr int kRegisterFile = 64 << 10, kMostRegisters = 255, kStep = 8;

void check_count(const char* name, int count) {
  if (count < 24 || count > 256 || count % kStep != 0)
    fail(std::string(name) + " takes multiples of 8 from 24 to 256, not " + std::to_string(count) + ": " +
         who());
}

int& registers_free() { return block.registers.free[own_rank()]; }
int& registers_held() { return block.registers.held[current->thread / kWarpgroup]; }

void wake_all() {
  for (Fiber* fiber : block.registers.waiting) wake(fiber);
  block.registers.waiting.clear();
}

}  // namespace

void begin_registers(int threads, int ranks) {
  const int each = std::min(kRegisterFile * ranks / threads, kMostRegisters) / kStep * kStep;
  block.registers.held.assign((threads + kWarpgroup - 1) / kWarpgroup, each);
  block.registers.free.assign(ranks, 0);
}

void release_registers(Site site, int count) {
  check_count(site.what, count);
  meet_warpgroup(site, [&](const std::vector<Fiber*>&) {
    int& held = registers_held();
    if (count > held) fail(text(site) + " to more registers than " + std::to_string(held) + ": " + who());
    registers_free() += held - count;
    held = count;
    wake_all();
  });
}

void claim_registers(Site site, int count) {
  check_count(site.what, count);
  meet_warpgroup(site, [&](const std::vector<Fiber*>&) {
    if (count < registers_held())
      fail(text(site) + " to fewer registers than " + std::to_string(registers_held()) + ": " + who());
  });
  // The first thread of the warpgroup that finds enough registers takes them for all of its threads.
  for (int* held = &registers_held(); *held < count;) {
    if (registers_free() >= count - *held) {
      registers_free() -= count - *held;
      *held = count;
      wake_all();
    } else {
      block.registers.waiting.push_back(current);
      wait_to_be_woken(site);
    }
  }
}

}  // namespace cuda_host
