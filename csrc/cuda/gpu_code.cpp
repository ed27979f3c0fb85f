#include "gpu_code.h"

#include <cstdlib>
#include <string>
#include <string_view>

namespace flash_attn_ext::cuda {
namespace {

constexpr std::string_view kMachineCode = "sm_", kPtx = "compute_";

bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

// A GPU runs machine code of its major version with the same or an earlier minor version, and all earlier PTX. Code for
// "a" runs only on this version; code for "f" also runs on later minor versions. Both may have PTX.
bool runs_on(std::string_view code, int capability, int least) {
  const bool is_ptx = starts_with(code, kPtx);
  const std::string version(code.substr(is_ptx ? kPtx.size() : kMachineCode.size()));
  char* suffix = nullptr;
  const int number = static_cast<int>(std::strtol(version.c_str(), &suffix, 10));
  if (number < least) return false;
  if (*suffix == 'a') return capability == number;
  const bool same_major = capability / 10 == number / 10;
  return capability >= number && (same_major || (is_ptx && *suffix == '\0'));
}

template <class Predicate>
bool any_code(const Predicate& predicate) {
  const std::string_view all = gpu_code();
  for (size_t begin = 0; begin < all.size();) {
    const size_t end = all.find(',', begin);
    if (predicate(all.substr(begin, end - begin))) return true;
    if (end == all.npos) break;
    begin = end + 1;
  }
  return false;
}

}  // namespace

#if !defined(FLASH_ATTN_EXT_CUDA_ON_HOST)  // on the host, a test sets the list

// In nvcc's __CUDA_ARCH_LIST__, 9.0 and 9.0a are both 900, and PTX is not listed.
#if !defined(FLASH_ATTN_EXT_GPU_CODE)
#error "setup.py defines FLASH_ATTN_EXT_GPU_CODE: the text after code= in nvcc's -gencode options"
#endif
#define FA_TEXT_OF(...) #__VA_ARGS__
#define FA_TEXT(...) FA_TEXT_OF(__VA_ARGS__)

const char* gpu_code() { return FA_TEXT(FLASH_ATTN_EXT_GPU_CODE); }

#endif

bool has_code_for(int capability, int least) {
  return any_code([=](std::string_view code) { return runs_on(code, capability, least); });
}

bool has_code_for_9_0a() {
  return any_code([](std::string_view code) { return code == "sm_90a" || code == "compute_90a"; });
}

}  // namespace flash_attn_ext::cuda
