#include "plan.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "../core/mask.h"
#include "../core/splits.h"
#include "checks.h"
#include "outputs.h"
#include "pack_params.h"

namespace flash_attn_ext {
namespace {

// A tensor with the size, strides and dtype of `form` at `address`, on any device. Nobody reads its elements: params
// are packed from it as from the tensor itself.
at::Tensor without_elements(const void* address, const at::Tensor& form) {
  return at::from_blob(const_cast<void*>(address), form.sizes(), form.strides(),
                       at::TensorOptions(form.scalar_type()));
}

// For memory that is still to be allocated: aligned as allocators do it.
at::Tensor not_allocated(const at::Tensor& form) {
  return form.defined() ? without_elements(reinterpret_cast<void*>(uintptr_t{1} << 20), form) : at::Tensor();
}

at::Tensor meta_like(const at::Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}

int64_t bytes_of(const at::Tensor& t) { return t.defined() ? static_cast<int64_t>(t.nbytes()) : 0; }

// The tensors of a call without their elements.
struct Forms {
  AttentionTensors given;     // as the caller passed them, on the Meta device
  AttentionTensors readable;  // as kernels read them
  int64_t copied_bytes = 0;   // of those that have to be copied for that
};

Forms forms_of(const AttentionTensors& tensors) {
  Forms forms;
  forms.given = tensors;
  for_each_tensor(forms.given, [](const TensorRule&, auto& t) {
    if (tensor_or_null(t)) t = meta_like(*tensor_or_null(t));
  });
  forms.readable = readable(forms.given);
  auto fill = [&](const auto& given, const auto& form, auto& readable) {
    if (!tensor_or_null(given)) return;
    const at::Tensor& r = *tensor_or_null(readable);
    if (r.is_same(*tensor_or_null(form))) {
      readable = without_elements(tensor_or_null(given)->const_data_ptr(), r);
    } else {
      forms.copied_bytes += bytes_of(r);
      readable = not_allocated(r);
    }
  };
#define FA_FILL(name, ...) fill(tensors.name, forms.given.name, forms.readable.name);
  FA_ATTENTION_TENSORS(FA_FILL)
#undef FA_FILL
  return forms;
}

// The Meta device has shapes and no kernels: a plan for it says what is allocated, and no more.
template <class Params>
KernelChoice choose(const Params& params, at::Device device) {
  if (device.is_cpu()) return choose_on_cpu(params);
  if (device.is_cuda()) return choose_on_cuda(params, device);
  TORCH_CHECK_NOT_IMPLEMENTED(device.is_meta(), "flash_attn: no kernel for device ", device,
                              "; allowed: cpu, cuda");
  return {};
}

Plan plan_of(const AttentionParams& params, KernelChoice choice, bool deterministic) {
  Plan plan;
  plan.choice = std::move(choice);
  plan.deterministic = deterministic;
  plan.sizes = params.sizes;
  plan.band = params.band;
  return plan;
}

// The sum over i < count of (first + i * step) / divisor, rounded down; first, step >= 0. Euclid's algorithm.
int64_t sum_of_quotients(int64_t count, int64_t first, int64_t step, int64_t divisor) {
  int64_t sum = 0;
  while (count > 0) {
    sum += count * (first / divisor) + count * (count - 1) / 2 * (step / divisor);
    first %= divisor;
    step %= divisor;
    const int64_t last = first + step * count;
    if (last < divisor) break;
    // What is left counts lattice points under a line: count them by columns instead of rows.
    count = last / divisor;
    first = last % divisor;
    std::swap(step, divisor);
  }
  return sum;
}

}  // namespace

int64_t Plan::visible_tiles(int64_t block_q, int64_t block_k) const {
  const int64_t blocks = sizes.seqlen_q / block_q;  // whole ones
  const int64_t last_rows = sizes.seqlen_q % block_q;
  int64_t tiles = 0;
  if (last_rows > 0) {
    const Range seen = visible_keys(band, sizes.seqlen_q - last_rows, sizes.seqlen_q, sizes.seqlen_k);
    if (seen.begin < seen.end) tiles += (seen.end - 1) / block_k - seen.begin / block_k + 1;
  }
  // Block i sees the keys [begin + i * block_q, end + i * block_q), cut off at 0 and seqlen_k.
  const int64_t begin = band.diagonal - band.left;
  const int64_t end = block_q + band.diagonal + band.right;
  if (begin >= end) return tiles;
  auto first_block_at = [&](int64_t key, int64_t offset) {  // the first i with offset + i * block_q >= key
    return clamp_to(key <= offset ? 0 : (key - offset - 1) / block_q + 1, 0, blocks);
  };
  const int64_t first = first_block_at(1, end);                // the first block that sees a key
  const int64_t last = first_block_at(sizes.seqlen_k, begin);  // behind the last one
  if (first >= last) return tiles;
  const int64_t past_0 = clamp_to(first_block_at(0, begin), first, last);
  const int64_t at_end = clamp_to(first_block_at(sizes.seqlen_k, end), first, last);
  // Up to the tile of the last key seen, less those before the tile of the first one.
  tiles += sum_of_quotients(at_end - first, end + first * block_q + block_k - 1, block_q, block_k);
  tiles += (last - at_end) * ceil_div(sizes.seqlen_k, block_k);
  tiles -= sum_of_quotients(last - past_0, begin + past_0 * block_q, block_q, block_k);
  return tiles;
}

Plan plan_attention(const AttentionTensors& given, const AttentionOptions& options) {
  check_attention(given, options);
  const Forms forms = forms_of(given);
  const auto [out, lse] = empty_result(forms.given);
  const AttentionParams params =
      pack_attention(forms.readable, not_allocated(out), not_allocated(lse), options);
  Plan plan = plan_of(params, choose(params, given.query.device()), options.deterministic);
  plan.bytes = {{"out", bytes_of(out)},
                {"lse", bytes_of(lse)},
                {"workspace", plan.choice.workspace_bytes},
                {"copies", forms.copied_bytes}};
  return plan;
}

Plan plan_attention_backward(const AttentionTensors& given, const AttentionOptions& options,
                             const GradFlags& grad_mask) {
  check_attention(given, options);
  const Forms forms = forms_of(given);
  const auto [out, lse] = empty_result(forms.given);
  const Gradients gradients = empty_gradients(forms.given, GradMask(grad_mask));
  Gradients results = gradients;
  std::apply([](auto&... grad) { ((grad = not_allocated(grad)), ...); }, results.tie());

  AttentionBackwardTensors tensors;
  tensors.set_forward(forms.readable);
  tensors.out = not_allocated(out);
  tensors.lse = not_allocated(lse);
  tensors.grad_out = tensors.out;
  AttentionBackwardOptions backward_options;
  backward_options.set_forward(options);
  backward_options.grad_mask = grad_mask;
  const PackedBackward packed = pack_backward(tensors, backward_options, results);

  Plan plan =
      plan_of(packed.params, choose(packed.params, given.query.device()), packed.params.deterministic);
  auto name = std::begin(Gradients::kNames);
  std::apply(
      [&](const auto&... grad) {
        (plan.bytes.emplace_back(std::string("d") + *name++, bytes_of(grad)), ...);
      },
      gradients.tie());
  // Per batch and head, and, where the slopes are the same for all batches, once more per head. So for the sink.
  int64_t per_head_bytes = 0;
  auto add_per_head = [&](const at::Tensor& per_head, const OptionalTensor& t) {
    const int64_t bytes = bytes_of(per_head);
    per_head_bytes += bytes;
    if (bytes > 0 && t->dim() == 1) per_head_bytes += bytes / given.query.size(0);
  };
  add_per_head(packed.dslopes_per_head, given.alibi_slopes);
  add_per_head(packed.dsink_per_head, given.sink);
  plan.bytes.emplace_back("workspace", plan.choice.workspace_bytes + per_head_bytes);
  plan.bytes.emplace_back("copies", forms.copied_bytes);
  return plan;
}

}  // namespace flash_attn_ext
