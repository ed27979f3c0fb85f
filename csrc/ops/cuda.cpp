// CUDA key: check, allocate, pack, let the selector choose a tier, launch on the current stream.
//
// This build has no tier yet, so the selector refuses every call and says why; nothing falls back to another
// implementation. The host side below is what the tiers will be called from.
#include <torch/library.h>

#include "checks.h"
#include "outputs.h"
#include "pack_params.h"

#if defined(FLASH_ATTN_EXT_WITH_CUDA)
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "../cuda/select.h"
#endif

namespace flash_attn_ext {
namespace {

#if defined(FLASH_ATTN_EXT_WITH_CUDA)

ForwardResult attention_cuda(FA_INPUT_ARGS, FA_OPTION_ARGS) {
  const AttentionInputs given = FA_INPUTS;
  const AttentionOptions options = FA_OPTIONS;
  check_attention(given, options);
  const c10::cuda::CUDAGuard device_guard(query.device());
  auto [out, lse] = empty_forward_result(given);
  const AttentionInputs inputs = make_readable(given);
  const AttentionParams params = pack_attention(inputs, out, lse, options);
  const cuda::Selection selection = cuda::select_forward(params);
  TORCH_CHECK_NOT_IMPLEMENTED(selection.launch, "flash_attn on CUDA: ", selection.reason);
  selection.launch(params, c10::cuda::getCurrentCUDAStream());
  return {out, lse};
}

#else

ForwardResult attention_cuda(FA_INPUT_ARGS, FA_OPTION_ARGS) {
  check_attention(FA_INPUTS, FA_OPTIONS);
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "flash_attn on CUDA: this build has no CUDA half; install it again with "
                              "FLASH_ATTN_EXT_CUDA=1, a CUDA build of torch and nvcc");
}

#endif

}  // namespace

TORCH_LIBRARY_IMPL(flash_attn_ext, CUDA, m) { m.impl("attention", attention_cuda); }

}  // namespace flash_attn_ext
