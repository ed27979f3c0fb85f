// Checks each tensor of an operator against its row in the declaration: device, dtype, shape.
#pragma once

#include <string>

#include "../dense/attention.h"

namespace flash_attn_ext {

// SymInt: traced calls with dynamic shapes run the same checks.
struct DimSizes {
  c10::SymInt sizes[static_cast<size_t>(Dim::kCount)];
  const c10::SymInt& operator[](Dim dim) const { return sizes[static_cast<size_t>(dim)]; }
  c10::SymInt& operator[](Dim dim) { return sizes[static_cast<size_t>(dim)]; }
};

// The name that Python shows for a dtype.
std::string name_of(at::ScalarType dtype);

void check_dimensions(const TensorRule& rule, const at::Tensor& t);
void check_device_and_dtype(const TensorRule& rule, const at::Tensor& t, const at::Tensor& query);
void check_shape(const TensorRule& rule, const at::Tensor& t, const DimSizes& sizes);
void check_seed_offset(const char* name, const at::Tensor& t);

// Checks a cache of CacheDType::kLatent: the kernels read 656 bytes of each row, and key is a view of 576 of them.
void check_latent_rows(const at::Tensor& key, const at::Tensor& value);

// Checks that the sizes fit each other.
void check_sizes(const DimSizes& sizes);

// The sizes of a call. The first tensor with a dimension sets its size. Optional tensors set no size.
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

// Checks the options and the tensors by their rows, then that the sizes fit each other. add_sizes(sizes) sets the sizes
// that no tensor has.
template <class Tensors, class Options, class AddSizes>
void check_rows(const Tensors& tensors, const Options& options, const AddSizes& add_sizes) {
  options.check();
  for_each_present_tensor(tensors, [&](const TensorRule& rule, const at::Tensor& t) {
    check_device_and_dtype(rule, t, tensors.query);
  });
  DimSizes sizes = sizes_of(tensors);
  add_sizes(sizes);
  for_each_present_tensor(tensors,
                          [&](const TensorRule& rule, const at::Tensor& t) { check_shape(rule, t, sizes); });
  check_sizes(sizes);
}

// These functions check arguments that are allowed only together with other arguments.

void check_rng_state(const OptionalTensor& rng_state, double dropout_p);

template <class Tensors>
PerGradient<OptionalTensor> differentiable_of(const Tensors& in) {
  PerGradient<OptionalTensor> given;
#define FA_COPY(name, ...) given.name = in.name;
  FA_DIFFERENTIABLE(FA_COPY)
#undef FA_COPY
  return given;
}
void check_grad_mask(const PerGradient<OptionalTensor>& given, const GradFlags& flags);
void check_tangents(const PerGradient<OptionalTensor>& given, const InputTangents& tangents);

}  // namespace flash_attn_ext
