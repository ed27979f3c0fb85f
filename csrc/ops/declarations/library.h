// The namespace of the operators in torch.ops, and torch's macros for it.
#pragma once

#include <torch/library.h>

// A kernel of the Hugging Face Hub (torch-ext/) has the namespace of its extension. So a process can load several
// versions of the kernel, beside the package.
#ifdef FA_HUB_KERNEL
#define FA_NAMESPACE TORCH_EXTENSION_NAME
#else
#define FA_NAMESPACE flash_attn_ext
#endif

// torch's macros paste the namespace to other words. The second macro of each pair first replaces FA_NAMESPACE.
#define FA_DEFINE_IN(space, m) TORCH_LIBRARY(space, m)
#define FA_LIBRARY(m) FA_DEFINE_IN(FA_NAMESPACE, m)
#define FA_DEFINE_MORE_IN(space, m) TORCH_LIBRARY_FRAGMENT(space, m)
#define FA_LIBRARY_FRAGMENT(m) FA_DEFINE_MORE_IN(FA_NAMESPACE, m)
#define FA_IMPLEMENT_IN(space, key, m) TORCH_LIBRARY_IMPL(space, key, m)
#define FA_LIBRARY_IMPL(key, m) FA_IMPLEMENT_IN(FA_NAMESPACE, key, m)
#define FA_TEXT_OF(space) #space
#define FA_EXPANDED_TEXT_OF(space) FA_TEXT_OF(space)
#define FA_NAMESPACE_TEXT FA_EXPANDED_TEXT_OF(FA_NAMESPACE)
