// scaled_dot_product_attention with every argument of torch: dropout, a mask that needs a gradient, another head
// dimension of value, any number of leading dimensions. Our autograd function records it.
#include <ATen/Context.h>
#include <ATen/ops/randint.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "arguments.h"
#include "overrides.h"

namespace flash_attn_ext::torch_overrides {
namespace {

bool is_subclass(const OptionalTensor& t) { return t && t->unsafeGetTensorImpl()->is_python_dispatch(); }

// torch.func includes this key while it evaluates a transform.
bool in_torch_func() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(
      c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

bool needs_grad(const OptionalTensor& t) { return t && at::GradMode::is_enabled() && t->requires_grad(); }

// Torch handles a traced or transformed call, because compiled graphs live longer than the activation: torch stores
// them on disk for other processes. The graph then has _scaled_dot_product_flash_attention_for_cpu, which runs our
// kernel while active and torch's kernel otherwise (flash_for_cpu.cpp). If torch puts matrix products into the graph
// instead, our kernels do not run.
const char* why_not_traced(const at::Tensor& query, const at::Tensor& value, const OptionalTensor& mask,
                           double dropout_p) {
  if (dropout_p > 0) return "traced by torch.compile or torch.func, with dropout";
  if (query.dim() != 4) return "traced by torch.compile or torch.func, with other than 4 dimensions";
  if (query.sym_size(-1) != value.sym_size(-1))
    return "traced by torch.compile or torch.func, with another head dimension of value";
  if (needs_grad(mask)) return "traced by torch.compile or torch.func, with a mask that needs a gradient";
  return "traced by torch.compile or torch.func: see _scaled_dot_product_flash_attention_for_cpu";
}

// Views (..., heads, S, D) as (B, heads, S, D).
at::Tensor as_4d(const at::Tensor& t) {
  if (t.dim() == 4) return t;
  if (t.dim() == 3) return t.unsqueeze(0);
  return t.flatten(0, t.dim() - 4);
}

struct SdpaCall {
  AttentionTensors tensors;  // rng_state is not drawn yet
  AttentionOptions options;
};

const char* read_call(Arguments arguments, SdpaCall& call) {
  const at::Tensor &query = arguments[0].toTensor(), &key = arguments[1].toTensor(),
                   &value = arguments[2].toTensor();
  const auto mask = tensor_or_none(arguments[3]);
  const double dropout_p = arguments[4].toDouble();
  const bool is_causal = arguments[5].toBool();
  const auto scale = arguments[6].toOptional<double>();
  const bool enable_gqa = arguments[7].toBool();

  if (is_subclass(query) || is_subclass(key) || is_subclass(value) || is_subclass(mask) ||
      c10::impl::dispatch_mode_enabled() || torch::jit::tracer::isTracing() || in_torch_func())
    return why_not_traced(query, value, mask, dropout_p);
  if (!at::globalContext().userEnabledFlashSDP())
    return "the flash backend is turned off (torch.nn.attention.sdpa_kernel)";
  if (const char* reason = why_not_tensors(query, key, value)) return reason;
  if (const char* reason = why_not_mask(mask, query)) return reason;
  if (!enable_gqa && key.size(-3) != query.size(-3) && key.size(-3) != 1)
    return "the heads of query and key differ without enable_gqa";
  if (is_causal && mask) return "is_causal together with attn_mask, which torch does not always take";
  if (!(dropout_p >= 0 && dropout_p <= 1)) return "dropout_p is not from 0 to 1";
  if (scale && !std::isfinite(*scale)) return "scale is not finite";
  if (mask && mask->dim() > std::max<int64_t>(query.dim(), 4))
    return "attn_mask has more dimensions than query";

  OptionalTensor mask_4d = mask_as_4d(mask);
  if (mask_4d) {
    if (query.dim() > 4) {
      for (int64_t dim = 0; dim < mask_4d->dim() - 3; ++dim)
        if (mask_4d->size(dim) != 1) return "attn_mask of a batch with several dimensions";
      mask_4d = mask_4d->flatten(0, mask_4d->dim() - 4);
    }
    const auto q_sizes = as_4d(query).sizes();
    const int64_t full[] = {q_sizes[0], q_sizes[1], q_sizes[2], key.size(-2)};
    for (int64_t dim = 0; dim < 4; ++dim)
      if (mask_4d->size(dim) != 1 && mask_4d->size(dim) != full[dim])
        return "attn_mask does not broadcast to the scores";
  }

  call.tensors.query = as_4d(query);
  call.tensors.key = as_4d(key);
  call.tensors.value = as_4d(value);
  call.tensors.attn_mask = mask_4d;
  call.options.scale = scale;
  call.options.causal = is_causal;
  call.options.dropout_p = dropout_p;
  call.options.deterministic = at::globalContext().deterministicAlgorithms();
  return nullptr;
}

}  // namespace

const char* why_not_sdpa(Arguments arguments) {
  SdpaCall call;
  return read_call(arguments, call);
}

const char* try_sdpa(Arguments arguments, Results& results) {
  const at::Tensor &query = arguments[0].toTensor(), &value = arguments[2].toTensor();
  SdpaCall call;
  if (const char* reason = read_call(arguments, call)) return reason;
  if (call.options.dropout_p > 0)
    call.tensors.rng_state =
        at::randint(std::numeric_limits<int64_t>::max(), {2}, query.options().dtype(at::kLong));
  at::Tensor out = flash_attn_ext::call<Attention>(call.tensors, call.options).out;
  if (query.dim() != 4) {
    auto sizes = query.sizes().vec();
    sizes.back() = value.size(-1);
    out = out.reshape(sizes);
  }
  results = {out};
  return nullptr;
}

}  // namespace flash_attn_ext::torch_overrides
