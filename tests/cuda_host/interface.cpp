// What tests/cuda_host.py calls through ctypes. The params structs are mirrored there; their sizes are
// compared.
#include <string>

#include "cuda/select.h"
#include "cuda/sm90/sm90.h"
#include "fibers.h"
#include "memory.h"

using flash_attn_ext::AttentionParams;
using flash_attn_ext::BackwardParams;
using flash_attn_ext::DropoutParams;
using flash_attn_ext::Sizes;

namespace {

int left_out = -1;

// Null if all went well; valid until the next call.
const char* report(cudaError_t status) {
  static std::string error;
  error = cuda_host::take_error();
  if (error.empty() && status != cudaSuccess) error = "launch error " + std::to_string(status);
  return error.empty() ? nullptr : error.c_str();
}

template <class Params>
const char* run(const flash_attn_ext::cuda::Selection<Params>& selection, const Params& params,
                void* workspace) {
  return selection.launch ? report(selection.launch(params, workspace, nullptr)) : selection.reason;
}

}  // namespace

extern "C" {

size_t attention_params_bytes() { return sizeof(AttentionParams); }
size_t backward_params_bytes() { return sizeof(BackwardParams); }

// For mutations_sm90.py, which puts a condition before some statements: all but one of them stay.
void leave_out(int number) { left_out = number; }
bool statement_stays(int number) { return number != left_out; }

void seed_order(uint64_t seed) { cuda_host::seed_order(seed); }
void forget_buffers() { cuda_host::forget_buffers(); }
void register_buffer(const void* data, int64_t bytes, int64_t element_bytes, const char* name, bool writable,
                     bool initialised) {
  cuda_host::register_buffer(data, bytes, element_bytes, name, writable, initialised);
}

size_t forward_workspace(const AttentionParams* p) {
  return flash_attn_ext::cuda::select_forward(*p).workspace_bytes;
}
const char* forward(const AttentionParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_forward(*p), *p, workspace);
}

const char* why_not_sm90_forward(const AttentionParams* p) {
  return flash_attn_ext::cuda::sm90::why_not_forward(*p);
}
const char* why_not_sm90_backward(const BackwardParams* p) {
  return flash_attn_ext::cuda::sm90::why_not_backward(*p);
}
const char* last_kernel() {
  static std::string name;
  return (name = cuda_host::last_kernel()).c_str();
}

size_t backward_workspace(const BackwardParams* p) {
  return flash_attn_ext::cuda::select_backward(*p).workspace_bytes;
}
const char* backward(const BackwardParams* p, void* workspace) {
  return run(flash_attn_ext::cuda::select_backward(*p), *p, workspace);
}

const char* dropout_mask(const DropoutParams* dropout, const Sizes* sizes, bool* kept) {
  return report(flash_attn_ext::cuda::launch_dropout_mask(*dropout, *sizes, kept, nullptr));
}
}
