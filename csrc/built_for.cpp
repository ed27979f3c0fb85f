// The torch that this library was built for, as text in the file. flash_attn_ext/_ops.py reads the text before it loads
// the library, because the library may not load with another torch.
#include <torch/version.h>

// The attributes keep it although nothing refers to it.
extern "C" __attribute__((used, visibility("default"))) const char flash_attn_ext_built_for[] =
    "flash_attn_ext was built for torch " TORCH_VERSION;
