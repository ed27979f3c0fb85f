#include "overrides.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

namespace flash_attn_ext::torch_overrides {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::OperatorHandle;
using Stack = torch::jit::Stack;

struct Override {
  const char* op;
  DispatchKey key;
  Attempt attempt;
};

// Under AutogradCPU scaled_dot_product_attention still has all arguments of the caller. Under tracing and torch.func we
// do not replace it: torch decomposes it into the operators below, and compiled graphs contain these operators.
constexpr std::array kOverrides{
    Override{"aten::scaled_dot_product_attention", DispatchKey::AutogradCPU, try_sdpa},
    Override{"aten::scaled_dot_product_attention", DispatchKey::CPU, try_sdpa},
    Override{"aten::_scaled_dot_product_flash_attention_for_cpu", DispatchKey::CPU, try_flash_for_cpu},
    Override{"aten::_scaled_dot_product_flash_attention_for_cpu_backward", DispatchKey::CPU,
             try_flash_for_cpu_backward},
    Override{"aten::_flash_attention_forward", DispatchKey::CPU, try_flash_attention},
    Override{"aten::_flash_attention_backward", DispatchKey::CPU, try_flash_attention_backward},
    Override{"aten::_flash_attention_forward_no_dropout_inplace", DispatchKey::CPU,
             try_flash_attention_inplace},
    Override{"aten::_native_multi_head_attention", DispatchKey::CPU, try_native_mha},
    Override{"aten::_native_multi_head_attention", DispatchKey::NestedTensorCPU, try_native_mha_nested},
    // The operators that torch lets other libraries replace on GPUs.
    Override{"aten::_flash_attention_forward", DispatchKey::CUDA, try_flash_attention},
    Override{"aten::_flash_attention_forward_no_dropout_inplace", DispatchKey::CUDA,
             try_flash_attention_inplace},
    Override{"aten::_flash_attention_backward", DispatchKey::CUDA, try_flash_attention_backward},
    Override{"aten::_scaled_dot_product_flash_attention", DispatchKey::CUDA, try_sdpa_flash},
    Override{"aten::_scaled_dot_product_flash_attention_backward", DispatchKey::CUDA,
             try_sdpa_flash_backward},
};

#if defined(FLASH_ATTN_EXT_WITH_CUDA)
constexpr bool kHasCudaKernels = true;
#else
constexpr bool kHasCudaKernels = false;
#endif

// Torch's kernels, for the calls that ours refuse. They are looked up before the first registration and never freed:
// a call that began while active may need its kernel after deactivate().
using Originals = std::array<std::optional<c10::SafeKernelFunction>, kOverrides.size()>;

const Originals& originals() {
  static const Originals found = [] {
    Originals all;
    for (size_t i = 0; i < kOverrides.size(); ++i) {
      const auto op = c10::Dispatcher::singleton().findSchema({kOverrides[i].op, ""});
      if (op && op->hasComputedKernelForDispatchKey(kOverrides[i].key))
        all[i] = op->getComputedKernelForDispatchKey(kOverrides[i].key);
    }
    return all;
  }();
  return found;
}

// One counter for each (override, reason). Reasons are literals, so they are few. The list only grows, so readers
// need no lock.
struct Counter {
  const size_t override_index;
  const std::string reason;
  std::atomic<int64_t> calls{0};
  Counter* next = nullptr;
};

std::atomic<Counter*> counters{nullptr};
std::mutex new_counter;

Counter* find_counter(size_t index, const std::string& reason) {
  for (Counter* c = counters.load(std::memory_order_acquire); c; c = c->next)
    if (c->override_index == index && c->reason == reason) return c;
  return nullptr;
}

void count(size_t index, const char* reason) {
  Counter* counter = find_counter(index, reason);
  if (!counter) {
    const std::lock_guard lock(new_counter);
    counter = find_counter(index, reason);
    if (!counter) {
      counter = new Counter{index, reason};
      counter->next = counters.load(std::memory_order_relaxed);
      counters.store(counter, std::memory_order_release);
    }
  }
  counter->calls.fetch_add(1, std::memory_order_relaxed);
}

template <size_t index>
void run(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const size_t arguments = op.schema().arguments().size();
  Results results;
  const char* why_not = "this build has no CUDA kernels";
  if (kHasCudaKernels || kOverrides[index].key != DispatchKey::CUDA)
    why_not = kOverrides[index].attempt(torch::jit::last(*stack, arguments), results);
  count(index, why_not ? why_not : "");
  if (why_not) {
    TORCH_CHECK_NOT_IMPLEMENTED(originals()[index], op.schema().name(), ": torch has no kernel for ",
                                c10::toString(kOverrides[index].key),
                                ", and flash_attn_ext does not take this call: ", why_not);
    originals()[index]->callBoxed(op, keys, stack);
    return;
  }
  torch::jit::drop(*stack, arguments);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

template <size_t index>
void register_one(torch::Library& library) {
  const auto& [op, key, attempt] = kOverrides[index];
  if (!c10::Dispatcher::singleton().findSchema({op, ""})) return;  // some versions of torch lack it
  library.impl(op, torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<run<index>>()));
}

template <size_t... index>
void register_all(torch::Library& library, std::index_sequence<index...>) {
  (register_one<index>(library), ...);
}

// The dispatcher warns when a kernel replaces another kernel; we do this on purpose. (It warns once in a process,
// for the first operator.)
struct NoWarnings : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

std::mutex registration_mutex;
std::unique_ptr<torch::Library> registration;

}  // namespace

void activate() {
  const std::lock_guard lock(registration_mutex);
  if (registration) return;
  originals();
  auto library =
      std::make_unique<torch::Library>(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  NoWarnings no_warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&no_warnings);
  register_all(*library, std::make_index_sequence<kOverrides.size()>());
  registration = std::move(library);
}

void deactivate() {
  const std::lock_guard lock(registration_mutex);
  registration.reset();
}

bool is_active() {
  const std::lock_guard lock(registration_mutex);
  return registration != nullptr;
}

Counts counts() {
  Counts all;
  for (const Counter* c = counters.load(std::memory_order_acquire); c; c = c->next)
    if (const int64_t calls = c->calls.load(std::memory_order_relaxed))
      all[{kOverrides[c->override_index].op, c->reason}] += calls;
  return all;
}

void reset_counts() {
  for (Counter* c = counters.load(std::memory_order_acquire); c; c = c->next) c->calls.store(0);
}

}  // namespace flash_attn_ext::torch_overrides
