// Runs the units one after the other. Prints for each whether the hardware behaves as the kernels assume.
//
// The units run in a child process. One that hangs, or leaves the GPU with an error that sticks, ends the
// child; a new one goes on with the next unit.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "unit.h"

namespace {

using gpu_units::Unit;

constexpr unsigned kSecondsToStart = 15;  // CUDA, in each child
constexpr unsigned kSecondsPerUnit = 3;   // they take milliseconds
constexpr int kNoDevice = 3;
constexpr int kCapability = 90;  // code for sm_90a runs on this compute capability only

// Shared by parent and children.
struct Progress {
  int next;  // the unit that runs, or will
  int failed;
};

std::vector<Unit> all_units() {
  std::vector<Unit> units;
  for (const auto& some :
       {gpu_units::sm80_units(), gpu_units::tma_units(), gpu_units::pair_units(), gpu_units::wgmma_units(),
        gpu_units::registers_units(), gpu_units::backward_units()})
    units.insert(units.end(), some.begin(), some.end());
  return units;
}

void report(const char* verdict, const Unit& unit, const std::string& why = "") {
  std::printf("%-8s%s%s%s\n", verdict, unit.name.c_str(), why.empty() ? "" : ": ", why.c_str());
  std::fflush(stdout);
}

// From progress.next on. Returns when all have run; ends the process where nothing more can be learnt in it.
void run_units(const std::vector<Unit>& units, Progress& progress) {
  alarm(kSecondsToStart);
  cudaDeviceProp device;
  cudaError_t status = cudaGetDeviceProperties(&device, 0);
  if (status == cudaSuccess) status = cudaFree(nullptr);  // starts CUDA
  const int capability = status == cudaSuccess ? 10 * device.major + device.minor : 0;
  if (capability != kCapability) {
    std::printf("gpu_units needs a GPU of compute capability 9.0 (H100, H200); got %s\n",
                status == cudaSuccess ? device.name : cudaGetErrorString(status));
    std::fflush(stdout);
    _exit(kNoDevice);
  }
  for (; progress.next < static_cast<int>(units.size()); ++progress.next) {
    const Unit& unit = units[progress.next];
    alarm(kSecondsPerUnit);
    try {
      const std::string difference = unit.run();
      if (!difference.empty()) ++progress.failed;
      report(difference.empty() ? "ok" : "FAILED", unit, difference);
    } catch (const gpu_units::CudaError& error) {
      ++progress.failed;
      report("FAILED", unit, error.what());
      ++progress.next;
      _exit(0);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Unit> units = all_units();
  if (argc > 1) {
    if (std::strcmp(argv[1], "--list") != 0) {
      std::fprintf(stderr, "usage: %s [--list]\n", argv[0]);
      return 2;
    }
    for (const Unit& unit : units) std::puts(unit.name.c_str());
    return 0;
  }
  void* shared = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) {
    std::perror("mmap");
    return 2;
  }
  Progress& progress = *new (shared) Progress{};
  while (progress.next < static_cast<int>(units.size())) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child < 0) {
      std::perror("fork");
      return 2;
    }
    if (child == 0) {
      run_units(units, progress);
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == kNoDevice) return kNoDevice;
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
      const bool late = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
      report("FAILED", units[progress.next],
             late ? "hangs: stopped after " + std::to_string(kSecondsPerUnit) + " s"
                  : std::string("its process died"));
      ++progress.failed;
      ++progress.next;
    }
  }
  const int count = static_cast<int>(units.size());
  std::printf("%d units: %d ok, %d failed\n", count, count - progress.failed, progress.failed);
  return progress.failed ? 1 : 0;
}
