// Runs the kernels of one instruction set on every case and dtype, against the dense reference.
//
//   address ISA [MATCH]             all cases, or the cases with MATCH in their names
//   address ISA MATCH --short NAME  buffers called NAME ("q", "dk", "saved out", ...) end one element early,
//                                   "workspace" 8192 bytes
//   address ISA MATCH --break WHAT  arena: a read past an array of the workspace; overflow: of an integer;
//                                   reference: a wrong expectation; race: unsynchronised writes; "tile ...": the
//                                   emulation of AMX (emulated_amx.h)
//
// --short and --break must fail: they prove that errors are reported. Exit status: 0 passed, 1 failed (also if
// AddressSanitizer or UBSan reported an error; ThreadSanitizer: 66), 2 wrong usage, 77 this CPU cannot run ISA.
#include <sanitizer/common_interface_defs.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <thread>

#include "buffers.h"
#include "core/arena.h"
#include "cpu/select.h"
#include "emulated_amx.h"
#include "inputs.h"
#include "run_case.h"

namespace test {
namespace {

namespace cpu = flash_attn_ext::cpu;

constexpr int kFailuresShown = 20;
constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};

std::string running = "nothing yet";

void say_what_was_running() { std::fprintf(stderr, "while running: %s\n", running.c_str()); }

// Returns the expected results of a case. The derivatives read the rounded results of the forward, as the kernels do.
Outputs expect(const Case& c, DType dtype, const Inputs& in) {
  Outputs r;
  reference_forward(c, in, r);
  reference_jvp(c, in, r);
  Outputs stored = r;
  for (auto* values : {&stored.out, &stored.t_out})
    for (double& x : *values) x = rounded(dtype, x);
  for (auto* values : {&stored.lse, &stored.t_lse})
    for (double& x : *values) x = rounded(accumulator_of(dtype), x);
  reference_backward(c, in, stored);
  reference_double_backward(c, in, stored);
  stored.out = r.out;
  stored.lse = r.lse;
  stored.t_out = r.t_out;
  stored.t_lse = r.t_lse;
  return stored;
}

// Returns whether a case about NaN has NaN results and other results, and every other case no NaN.
bool poison_shows(const Case& c, const Outputs& expected) {
  const auto is_nan = [](double x) { return std::isnan(x); };
  const auto nans = std::count_if(expected.out.begin(), expected.out.end(), is_nan);
  return c.poison == Poison::kSeen ? nans > 0 && nans < static_cast<int64_t>(expected.out.size()) : nans == 0;
}

#if defined(__SANITIZE_THREAD__)
constexpr bool kLooksForRaces = true;
#else
constexpr bool kLooksForRaces = false;
#endif

// Returns whether a case runs. The tables for bfloat16 share the kernels of float32 with another table, so float32 runs few
// cases there. generic and neon run float32 and bfloat16 in every case. float64 and float16 differ in vector lengths and
// conversions: they run every length and head dimension. avx2, avx512 and the search for races are compiled for float32
// and one 16-bit type (Makefile), which run every case.
bool runs_case(const cpu::Kernels& kernels, DType dtype, const Case& c) {
  // ops/checks refuse other masks, so there are no kernels for them.
  if (c.mask && c.mask->dtype != DType::kBool && c.mask->dtype != DType::kFloat32 && c.mask->dtype != dtype)
    return false;
  const std::string isa = kernels.isa;
  const bool has_every_dtype = !kLooksForRaces && (isa == "generic" || isa == "neon");
  if (dtype == DType::kFloat64 && !has_every_dtype) return false;
  if (dtype == DType::kFloat16 && !has_every_dtype) return isa == "avx2";
  if (dtype == DType::kBFloat16 && isa == "avx2") return false;
  const auto is_in = [&](const char* group) { return c.name.find(group) != std::string::npos; };
  if (dtype == DType::kBFloat16 || is_in("everything")) return true;
  if (isa == "amx" || isa == "avx512_bf16" || isa == "neon_bf16") return false;
  return dtype == DType::kFloat32 || is_in("lengths") || is_in("head dims") || is_in("every dtype");
}

int run_all(const cpu::Kernels& kernels, const std::string& match, bool wrong_reference) {
  const double reference_error = reference_self_check();
  if (!(reference_error < 1e-7)) {
    std::printf("FAIL reference: off by %g from finite differences\n", reference_error);
    return 1;
  }
  int cases = 0, runs = 0, failures = 0;
  for (const Case& c : all_cases()) {
    if (c.name.find(match) == std::string::npos) continue;
    ++cases;
    for (const DType dtype : kDTypes) {
      if (!runs_case(kernels, dtype, c)) continue;
      running = std::string(kernels.isa) + ", " + name_of(dtype) + ", case " + c.name;
      const Inputs in = make_inputs(c, dtype);
      Outputs expected = expect(c, dtype, in);
      if (wrong_reference) expected.dk.back() += 0.1;
      std::vector<std::string> errors = run_case(kernels, c, dtype, in, expected);
      if (!poison_shows(c, expected)) errors.push_back("the case is not about NaN, or about nothing else");
      ++runs;
      failures += !errors.empty();
      if (failures > kFailuresShown) continue;
      for (const std::string& error : errors) std::printf("FAIL %s: %s\n", running.c_str(), error.c_str());
    }
  }
  std::printf("%s: %d cases, %d runs, %d failures\n", kernels.isa, cases, runs, failures);
  return failures || !cases;
}

int break_something(const cpu::Kernels& kernels, const std::string& match, const std::string& fault) {
  if (fault == "arena") {
    const Buffer memory(256, 64);
    flash_attn_ext::Arena arena(memory.data());
    const volatile float* array = arena.take<float>(3);
    arena.take<float>(3);
    return array[3] == 0;
  }
  if (fault == "overflow") {
    const volatile int largest = INT_MAX;
    return largest + 1 == 0;
  }
  if (fault == "race") {
    volatile int written = 0;
    std::thread other([&] { written = 1; });
    written = 2;
    other.join();
    return 0;
  }
  if (fault == "reference") return run_all(kernels, match, true);
  if (fault.rfind("tile ", 0) == 0) {
    amx::broken = fault;
    return run_all(kernels, match, false);
  }
  return 2;
}

int run(const std::vector<std::string>& args) {
  const std::string mode = args.size() == 4 ? args[2] : "";
  if (args.empty() || args.size() == 3 || args.size() > 4) return 2;
  try {
    cpu::force_isa(args[0]);
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 77;
  }
  const cpu::Kernels& kernels = cpu::active_kernels();
  const std::string match = args.size() > 1 ? args[1] : "";
  if (mode == "--break") return break_something(kernels, match, args[3]);
  if (mode == "--short") short_buffer = args[3];
  return run_all(kernels, match, false);
}

}  // namespace
}  // namespace test

extern "C" void __ubsan_on_report() { test::say_what_was_running(); }  // its death skips the callback below

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // prints each line at once: a sanitizer may end the program
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  __sanitizer_set_death_callback(test::say_what_was_running);
#endif
  return test::run({argv + 1, argv + argc});
}
