// Which instruction set's kernels run. Detected at run time; FLASH_ATTN_EXT_ISA or force_isa() pins one.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "run.h"

namespace flash_attn_ext::cpu {

// The kernels in use: the forced ones, else the best that this CPU can run. Throws std::invalid_argument if
// FLASH_ATTN_EXT_ISA names an instruction set that is unknown or that this CPU lacks.
const Kernels& active_kernels();

// Names of all kernels that this build has and this CPU can run, slowest first.
std::vector<std::string> available_isas();

// Why each instruction set that is faster than the active one does not run, the fastest first.
std::vector<std::string> why_not_faster();

// How often each available instruction set's kernels have run.
std::map<std::string, int64_t> kernel_calls();

// Pins `name` for the process, or returns to detection if it is empty. Throws std::invalid_argument if it is
// unknown or impossible here.
void force_isa(const std::string& name);

}  // namespace flash_attn_ext::cpu
