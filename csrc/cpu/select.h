// Selects the kernels by instruction set: detected at run time, or forced by FLASH_ATTN_EXT_ISA or force_isa().
#pragma once

#include <map>
#include <string>
#include <vector>

#include "run.h"

namespace flash_attn_ext::cpu {

// Returns the kernels in use: the forced ones, or the best ones that this CPU can run. Throws std::invalid_argument
// if FLASH_ATTN_EXT_ISA is unknown, or not supported by this CPU.
const Kernels& active_kernels();

// Returns the names of the kernels in this build that this CPU can run, slowest first.
std::vector<std::string> available_isas();

// Returns, for each faster instruction set, why it does not run. The fastest is first.
std::vector<std::string> why_not_faster();

// Returns the number of calls for each instruction set. float32 calls of avx512_bf16 run kernels of avx512, and count
// as avx512.
std::map<std::string, int64_t> kernel_calls();

// Forces `name` for this process, or detects again if `name` is empty. Throws std::invalid_argument if `name` is
// unknown, or not supported by this CPU.
void force_isa(const std::string& name);

}  // namespace flash_attn_ext::cpu
