// Each tensor of an operator against its row in the declaration (ops.h, argument_kinds.h): device, dtype, shape. What checks.cpp
// and checks_packed.cpp share.
#pragma once

#include <string>

#include "ops.h"

namespace flash_attn_ext {

// Sizes are compared as SymInt: the same text then serves traced calls with dynamic shapes.
struct DimSizes {
  c10::SymInt sizes[static_cast<size_t>(Dim::kCount)];
  const c10::SymInt& operator[](Dim dim) const { return sizes[static_cast<size_t>(dim)]; }
  c10::SymInt& operator[](Dim dim) { return sizes[static_cast<size_t>(dim)]; }
};

// torch's own name of a dtype, as Python shows it.
std::string name_of(at::ScalarType dtype);

void check_dimensions(const TensorRule& rule, const at::Tensor& t);
void check_device_and_dtype(const TensorRule& rule, const at::Tensor& t, const at::Tensor& query);
void check_shape(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes);
void check_seed_offset(const char* name, const at::Tensor& t);

// Checks that the sizes fit each other.
void check_sizes(const DimSizes& sizes);

// The sizes of a call, each from the first tensor that has it. Optional tensors decide no size.
template <class Tensors>
DimSizes sizes_of(const Tensors& in) {
  DimSizes sizes;
  bool is_set[static_cast<size_t>(Dim::kCount)] = {};
  for_each_tensor(in, [&](const TensorRule& rule, const auto& t) {
    if constexpr (std::is_same_v<decltype(t), const at::Tensor&>) {
      if (rule.shape.kind != Shape::kExact) return;
      check_dimensions(rule, t);
      for (int n = 0; n < rule.shape.count; ++n) {
        const auto dim = static_cast<size_t>(rule.shape.dims[n]);
        if (!is_set[dim]) sizes.sizes[dim] = t.sym_size(n);
        is_set[dim] = true;
      }
    }
  });
  return sizes;
}

// sizes_of(tensors, options...) makes all sizes of a call.
template <class Tensors, class... Options>
DimSizes check_tensors(const Tensors& tensors, const Options&... options) {
  for_each_tensor(tensors, [&](const TensorRule& rule, const auto& optional) {
    if (const at::Tensor* t = tensor_or_null(optional)) check_device_and_dtype(rule, *t, tensors.query);
  });
  DimSizes sizes = sizes_of(tensors, options...);
  for_each_tensor(tensors, [&](const TensorRule& rule, const auto& optional) {
    if (const at::Tensor* t = tensor_or_null(optional)) check_shape(rule, *t, sizes);
  });
  return sizes;
}

// Of options, by the checks in their rows.

inline double shown(double v) { return v; }
inline double shown(const std::optional<double>& v) { return v.value_or(0.0); }
inline int64_t shown(int64_t v) { return v; }
inline int64_t shown(const std::optional<int64_t>& v) { return v.value_or(0); }
inline bool shown(bool v) { return v; }
inline c10::SymInt shown(const std::optional<c10::SymInt>& v) { return v.value_or(0); }

#define FA_CHECK_OPTION(name, type, default_value, check, allowed)                         \
  {                                                                                        \
    [[maybe_unused]] const auto& v = options.name;                                         \
    TORCH_CHECK_VALUE(check, #name ": got ", shown(options.name), "; allowed: ", allowed); \
  }

template <class Tensors>
void check_rng_state(const Tensors& in, double dropout_p) {
  TORCH_CHECK_VALUE(dropout_p == 0.0 || in.rng_state,
                    "rng_state: got none; allowed with dropout_p > 0: an int64 tensor of seed and offset");
}

template <class Tensors>
void check_grad_mask(const Tensors& tensors, const GradFlags& flags) {
  const GradMask wanted(flags);
  TORCH_CHECK_VALUE(!wanted.attn_mask || (tensors.attn_mask && tensors.attn_mask->scalar_type() != at::kBool),
                    "grad_mask: got a request for attn_mask's gradient; allowed only with a float attn_mask");
  TORCH_CHECK_VALUE(!wanted.alibi_slopes || tensors.alibi_slopes,
                    "grad_mask: got a request for alibi_slopes' gradient; allowed only with alibi_slopes");
  TORCH_CHECK_VALUE(!wanted.sink || tensors.sink,
                    "grad_mask: got a request for sink's gradient; allowed only with sink");
}

template <class Tensors>
void check_tangents(const Tensors& in, const InputTangents& tangents) {
  TORCH_CHECK_VALUE(!tangents.attn_mask || (in.attn_mask && in.attn_mask->scalar_type() != at::kBool),
                    "tangent_attn_mask: got one; allowed only with a float attn_mask");
  TORCH_CHECK_VALUE(!tangents.alibi_slopes || in.alibi_slopes,
                    "tangent_alibi_slopes: got one; allowed only with alibi_slopes");
  TORCH_CHECK_VALUE(!tangents.sink || in.sink, "tangent_sink: got one; allowed only with sink");
}

}  // namespace flash_attn_ext
