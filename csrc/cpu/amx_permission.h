// Checks whether this process may use the tile registers of AMX.
#pragma once

namespace flash_attn_ext::cpu {

// Returns true if the CPU has tile registers for bfloat16, the operating system saves them per thread, and Linux
// permits them to this process. The first call requests the permission; threads and forked processes inherit it.
bool may_use_amx();

}  // namespace flash_attn_ext::cpu
