// attention_merge_: merges two results of attention of the same queries. Each result is of a part of the keys. Context
// parallel attention calls it for each part of the keys that a process receives (flash_attn_ext/distributed/).
//
//   lse' = log(exp(lse) + exp(part_lse)),  out' = out * exp(lse - lse') + part_out * exp(part_lse - lse')
//
// out and lse hold the running result in the accumulators' type; part_out has the operator's dtype. Each element is read
// and written once. A row with one part so far equals that part to the last bit.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/logaddexp.h>

#include <cmath>
#include <limits>

#include "../declarations/library.h"

namespace flash_attn_ext {
namespace {

void check_merge(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part_out,
                 const at::Tensor& part_lse) {
  TORCH_CHECK_TYPE(out.scalar_type() == at::kFloat || out.scalar_type() == at::kDouble, "out: got dtype ",
                   out.scalar_type(), "; allowed: float32, float64");
  TORCH_CHECK_TYPE(part_out.is_floating_point(), "part_out: got dtype ", part_out.scalar_type(),
                   "; allowed: a floating point type");
  for (const auto& [name, t] :
       {std::pair<const char*, const at::Tensor&>{"lse", lse}, {"part_lse", part_lse}})
    TORCH_CHECK_TYPE(t.scalar_type() == out.scalar_type(), name, ": got dtype ", t.scalar_type(),
                     "; allowed: out's, ", out.scalar_type());
  TORCH_CHECK_VALUE(out.dim() == 4 && part_out.sym_sizes() == out.sym_sizes(), "part_out: got shape ",
                    part_out.sym_sizes(), "; allowed: out's, ", out.sym_sizes(), ", of 4 dimensions");
  const auto rows = out.sym_sizes().slice(0, 3);
  for (const auto& [name, t] :
       {std::pair<const char*, const at::Tensor&>{"lse", lse}, {"part_lse", part_lse}})
    TORCH_CHECK_VALUE(t.sym_sizes() == rows, name, ": got shape ", t.sym_sizes(), "; allowed: ", rows);
}

template <class Acc, class Part>
void merge_row(Acc* out, Acc& lse, const Part* part_out, Acc part_lse, int64_t columns) {
  constexpr Acc kNoKeys = -std::numeric_limits<Acc>::infinity();
  if (part_lse == kNoKeys) return;
  if (lse == kNoKeys) {
    for (int64_t d = 0; d < columns; ++d) out[d] = static_cast<Acc>(part_out[d]);
    lse = part_lse;
    return;
  }
  const Acc most = std::max(lse, part_lse), of_out = std::exp(lse - most),
            of_part = std::exp(part_lse - most);
  const Acc sum = of_out + of_part, a = of_out / sum, b = of_part / sum;
  for (int64_t d = 0; d < columns; ++d) out[d] = out[d] * a + static_cast<Acc>(part_out[d]) * b;
  lse = most + std::log(sum);
}

void merge_cpu(at::Tensor& out, at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse) {
  check_merge(out, lse, part_out, part_lse);
  const at::Tensor part = part_out.size(3) <= 1 || part_out.stride(3) == 1 ? part_out : part_out.contiguous();
  TORCH_CHECK_VALUE(out.size(3) <= 1 || out.stride(3) == 1,
                    "out: got a tensor whose last dimension is not contiguous; allowed: a contiguous one");
  const int64_t heads = out.size(1), rows = out.size(2), columns = out.size(3);
  AT_DISPATCH_FLOATING_TYPES(out.scalar_type(), "attention_merge_", [&] {
    using Acc = scalar_t;
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, part.scalar_type(), "attention_merge_", [&] {
      using Part = scalar_t;
      Acc* const out_data = out.mutable_data_ptr<Acc>();
      Acc* const lse_data = lse.mutable_data_ptr<Acc>();
      const Part* const part_data = part.const_data_ptr<Part>();
      const Acc* const part_lse_data = part_lse.const_data_ptr<Acc>();
      at::parallel_for(0, out.size(0) * heads * rows, 64, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
          const int64_t b = n / rows / heads, h = n / rows % heads, i = n % rows;
          const auto row_of = [&](const at::Tensor& t) {
            return b * t.stride(0) + h * t.stride(1) + i * t.stride(2);
          };
          merge_row(out_data + row_of(out), lse_data[row_of(lse)], part_data + row_of(part),
                    part_lse_data[row_of(part_lse)], columns);
        }
      });
    });
  });
}

// Other devices: by torch's operators.
void merge(at::Tensor& out, at::Tensor& lse, const at::Tensor& part_out, const at::Tensor& part_lse) {
  check_merge(out, lse, part_out, part_lse);
  const at::Tensor merged = at::logaddexp(lse, part_lse);
  const auto factor_of = [&](const at::Tensor& of) {  // a row without keys would be -inf - -inf
    const at::Tensor no_keys = of.eq(-std::numeric_limits<double>::infinity());
    return of.sub(merged).exp().masked_fill(no_keys, 0.0).unsqueeze(-1);
  };
  const at::Tensor part_factor = factor_of(part_lse);
  out.mul_(factor_of(lse)).addcmul_(part_out.to(out.scalar_type()), part_factor);
  lse.copy_(merged);
}

}  // namespace

FA_LIBRARY_FRAGMENT(m) {
  m.def("attention_merge_(Tensor(a!) out, Tensor(b!) lse, Tensor part_out, Tensor part_lse) -> ()");
}

FA_LIBRARY_IMPL(CPU, m) { m.impl("attention_merge_", merge_cpu); }
FA_LIBRARY_IMPL(CompositeExplicitAutograd, m) { m.impl("attention_merge_", merge); }

}  // namespace flash_attn_ext
