#include "select.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "amx_permission.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace flash_attn_ext::cpu {
namespace {

bool cpu_has_avx2() {
#if defined(__x86_64__)
  unsigned eax, ebx, ecx = 0, edx;  // not __builtin_cpu_supports: clang 14 has no name for F16C
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  return has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool cpu_has_avx512() {
#if defined(__x86_64__)
  return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool cpu_has_avx512_bf16() {
#if defined(__x86_64__)
  return cpu_has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

// Returns whether bfloat16 calls are faster with avx512, which widens bfloat16, than with avx512_bf16. True for Intel's cores
// with AVX512-FP16 (Sapphire Rapids onwards). One core starts half a vdpbf16ps a cycle and two vfmadd231ps a cycle: 16 and
// 32 products. On Zen 4 and Zen 5, both instructions have the same rate.
bool multiplies_bfloat16_slowly() {
#if defined(__x86_64__)
  constexpr unsigned kFp16 = 1u << 23;  // older compilers have no name for AVX512-FP16
  unsigned eax, ebx, ecx, edx = 0;
  return __builtin_cpu_is("intel") && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & kFp16);
#else
  return false;
#endif
}

bool cpu_has_neon_bf16() {
#if defined(__aarch64__) && defined(__linux__)
  constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers lack
  return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__aarch64__) && defined(__APPLE__)
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has != 0;
#else
  return false;
#endif
}

struct Candidate {
  const Kernels* kernels;
  bool runs_here;
};

// Slowest first.
std::vector<Candidate> candidates() {
  std::vector<Candidate> found;
  const Candidate avx512 = {kAvx512Kernels, cpu_has_avx512()},
                  avx512_bf16 = {kAvx512Bf16Kernels, cpu_has_avx512_bf16()};
  const bool widening_is_faster = multiplies_bfloat16_slowly();
  const Candidate all[] = {
      {kGenericKernels, true},
      {kAvx2Kernels, cpu_has_avx2()},
      widening_is_faster ? avx512_bf16 : avx512,
      widening_is_faster ? avx512 : avx512_bf16,
      {kAmxKernels, cpu_has_avx512_bf16() && may_use_amx()},
      {kNeonKernels, true},  // every 64-bit ARM CPU has NEON
      {kNeonBf16Kernels, cpu_has_neon_bf16()},
  };
  for (const Candidate& c : all)
    if (c.kernels) found.push_back(c);
  return found;
}

std::string list(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Returns the kernels called `name`. Throws std::invalid_argument that names `source`, the origin of the name.
const Kernels* find_kernels(const std::string& name, const std::string& source) {
  bool is_built = false;
  for (const Candidate& c : candidates()) {
    if (name != c.kernels->isa) continue;
    if (c.runs_here) return c.kernels;
    is_built = true;
  }
  throw std::invalid_argument(
      source + ": got '" + name + "', " +
      (is_built ? "which this CPU cannot run" : "which is not an instruction set of this build") +
      "; allowed here: " + list(available_isas()));
}

const Kernels* detect() {
  const char* forced = std::getenv("FLASH_ATTN_EXT_ISA");
  if (forced && *forced) return find_kernels(forced, "FLASH_ATTN_EXT_ISA");
  const Kernels* best = nullptr;
  for (const Candidate& c : candidates())
    if (c.runs_here) best = c.kernels;
  return best;
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

const Kernels& active_kernels() {
  const Kernels* kernels = active.load(std::memory_order_acquire);
  if (!kernels) {
    kernels = detect();
    active.store(kernels, std::memory_order_release);
  }
  return *kernels;
}

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Candidate& c : candidates())
    if (c.runs_here) names.emplace_back(c.kernels->isa);
  return names;
}

std::vector<std::string> why_not_faster() {
  const std::string active_isa = active_kernels().isa;
  std::vector<std::string> reasons;
  for (const Candidate& c : candidates()) {
    const std::string reason = c.runs_here ? active_isa + " is forced" : "this CPU cannot run it";
    reasons.insert(reasons.begin(), c.kernels->isa + (": " + reason));
    if (c.kernels->isa == active_isa) reasons.clear();  // this kernel runs; earlier kernels are slower
  }
  return reasons;
}

std::map<std::string, int64_t> kernel_calls() {
  std::map<std::string, int64_t> calls;
  for (const Candidate& c : candidates())
    if (c.runs_here) calls[c.kernels->isa] = c.kernels->calls->load(std::memory_order_relaxed);
  return calls;
}

void force_isa(const std::string& name) {
  active.store(name.empty() ? detect() : find_kernels(name, "isa"), std::memory_order_release);
}

}  // namespace flash_attn_ext::cpu
