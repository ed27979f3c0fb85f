// The torch that this library was built for, as text in the file: flash_attn_ext/_ops.py reads it before it loads the
// library, because with another torch it may not load at all.
#include <torch/version.h>

// The attributes keep it although nothing refers to it.
extern "C" __attribute__((used, visibility("default"))) const char flash_attn_ext_built_for[] =
    "flash_attn_ext was built for torch " TORCH_VERSION;
