// The extension of a kernel of the Hugging Face Hub (build.toml). Its operators register themselves when Python imports it.
// kernel-builder writes registration.h.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
