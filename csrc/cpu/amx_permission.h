// Whether this process may use the tile registers of AMX.
#pragma once

namespace flash_attn_ext::cpu {

// True if the CPU has them for bfloat16, the operating system saves them for each thread, and Linux permits them to this
// process. The first call asks for that permission; threads and forked processes inherit it.
bool may_use_amx();

}  // namespace flash_attn_ext::cpu
