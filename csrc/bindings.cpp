// The Python module flash_attn_ext._C: inspection, explain, activation. Importing it also runs the FA_LIBRARY
// registrations of ops/.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <algorithm>
#include <functional>
#include <map>

#include "bindings_of_indexer.h"
#include "cpu/select.h"
#include "cuda/tiers.h"
#include "ops/keys/eager.h"
#include "ops/keys/from_python.h"
#include "ops/keys/plan.h"
#include "ops/operators.h"
#include "torch_overrides/overrides.h"

namespace {

namespace cpu = flash_attn_ext::cpu;
using flash_attn_ext::KernelChoice;
using flash_attn_ext::Plan;
using flash_attn_ext::PlanPart;

pybind11::dict build_info() {
  pybind11::dict info;
  info["torch"] = TORCH_VERSION;
#if defined(__clang__)
  info["compiler"] = "clang " __clang_version__;
#else
  info["compiler"] = "gcc " __VERSION__;
#endif
#if defined(FLASH_ATTN_EXT_WITH_CUDA)
  info["cuda"] = true;
#else
  info["cuda"] = false;
#endif
#if defined(_OPENMP)
  info["openmp"] = true;
#else
  info["openmp"] = false;
#endif
  info["max_head_dim"] = flash_attn_ext::kMaxHeadDim;
  return info;
}

// Reads a struct from a dictionary with its members by name.
template <class Struct>
Struct read(const pybind11::dict& by_name) {
  PyObject* objects[flash_attn_ext::kMembers<Struct>];
  flash_attn_ext::objects_by_name<Struct>(by_name.ptr(), objects);
  Struct result;
  TORCH_CHECK_TYPE(flash_attn_ext::all_from_python(objects, result), "flash_attn_ext: internal error, got ",
                   std::string(pybind11::repr(by_name)));
  return result;
}

// The functions of an operator that Python calls. All operators' functions have one type, because pybind11 compiles much code
// for each type.

// Steps 1 to 5 of checks/checks.h.
template <class Op>
void check(const pybind11::dict& tensors_by_name, const pybind11::dict& options_by_name) {
  const auto tensors = read<typename Op::Tensors>(tensors_by_name);
  const auto options = read<typename Op::Options>(options_by_name);
  Op::check(tensors, options);
  flash_attn_ext::check_contents(tensors, options);
}

template <class Op>
Plan plan_of_forward(const pybind11::dict& tensors, const pybind11::dict& options) {
  return flash_attn_ext::plan_forward<Op>(read<typename Op::Tensors>(tensors),
                                          read<typename Op::Options>(options));
}

template <class Op, class Backward>
Plan plan_of_backward(const pybind11::dict& tensors, const pybind11::dict& options,
                      const std::vector<bool>& grad_mask) {
  decltype(Backward::Options::grad_mask) flags;
  TORCH_CHECK_TYPE(grad_mask.size() == flags.size(), "flash_attn_ext: internal error, got ", grad_mask.size(),
                   " flags");
  std::copy(grad_mask.begin(), grad_mask.end(), flags.begin());
  return flash_attn_ext::plan_backward<Op, Backward>(read<typename Op::Tensors>(tensors),
                                                     read<typename Op::Options>(options), flags);
}

// Runs an operator with other kernels: tests/cuda_host. Everything else is the code of the CUDA key. The kernels are
// run(params as bytes, {name: input}, {name: output}). Returns the results.
using Run = flash_attn_ext::RunFromPython;

template <class Tensors>
constexpr auto has_functions(int) -> decltype(&Tensors::functions, bool()) {
  return true;
}
template <class Tensors>
constexpr bool has_functions(...) {
  return false;
}
// The tensors of functions of the user that kernels read. Programs are in the host's memory.
template <class Packed>
auto read_by_functions(const Packed& packed) -> decltype(packed.function_tensors) {
  auto tensors = packed.function_tensors;
  tensors.programs.reset();
  return tensors;
}

// Tensors with their names, for Python.
class NamedTensors {
 public:
  template <class Struct>
  void add(const Struct& tensors, const char* kind) {
    size_t n = 0;
    tensors.with_members([&](const auto&... t) { (add_one(t, kind + std::to_string(n++)), ...); });
  }
  template <class Tensors>
  void add(const Tensors& tensors) {
    size_t n = 0;
    tensors.with_members([&](const auto&... t) { (add_one(t, Tensors::kRules[n++].name), ...); });
  }
  const pybind11::dict& by_name() const { return by_name_; }

 private:
  template <class T>
  [[gnu::noinline]] void add_one(const T& optional, const std::string& name) {
    if (const at::Tensor* t = flash_attn_ext::tensor_or_null(optional)) by_name_[name.c_str()] = *t;
  }
  pybind11::dict by_name_;
};

template <class Op>
std::vector<std::optional<at::Tensor>> run_operator(const pybind11::dict& tensors_by_name,
                                                    const pybind11::dict& options_by_name, const Run& run) {
  const auto given = read<typename Op::Tensors>(tensors_by_name);
  const auto options = read<typename Op::Options>(options_by_name);
  Op::check(given, options);
  const typename Op::Result result = Op::empty(given, options);
  flash_attn_ext::pack_and_run<Op>(given, options, result, [&](const auto& packed) {
    NamedTensors inputs, outputs;
    inputs.add(packed.tensors);
    if constexpr (has_functions<typename Op::Tensors>(0)) inputs.add(read_by_functions(packed));
    outputs.add(result, "result ");
    outputs.add(packed.per_head, "per-head part ");
    run(pybind11::bytes(reinterpret_cast<const char*>(&packed.params), sizeof(packed.params)),
        inputs.by_name(), outputs.by_name());
  });
  return result.with_members([](const auto&... t) {
    return std::vector<std::optional<at::Tensor>>{flash_attn_ext::defined_or_none(t)...};
  });
}

template <size_t n>
pybind11::tuple names(const char* const (&names)[n]) {
  return pybind11::cast(std::vector<std::string>(names, names + n));
}

// (name, autocast, vmap) of each tensor: for the parts of torch that take Python functions only.
pybind11::tuple rows_of(c10::ArrayRef<flash_attn_ext::TensorRule> rules) {
  using flash_attn_ext::AutocastRule, flash_attn_ext::VmapRule;
  static const std::map<AutocastRule, const char*> autocast = {
      {AutocastRule::kCast, "cast"},
      {AutocastRule::kUnlessFloat32, "unless_float32"},
      {AutocastRule::kKeep, "keep"}};
  static const std::map<VmapRule, const char*> vmap = {{VmapRule::kBatch, "batch"},
                                                       {VmapRule::kBatchOrOne, "batch_or_one"},
                                                       {VmapRule::kPerHead, "per_head"},
                                                       {VmapRule::kLoop, "loop"}};
  pybind11::list result;
  for (const flash_attn_ext::TensorRule& rule : rules)
    result.append(pybind11::make_tuple(rule.name, autocast.at(rule.autocast), vmap.at(rule.vmap)));
  return result;
}

// The table of core/program.h, for the test that compares flex/operations.py with it.
pybind11::list program_operations() {
  pybind11::list rows;
  for (const flash_attn_ext::OperationRow& row : flash_attn_ext::kOperations)
    rows.append(pybind11::make_tuple(row.name, row.arguments, std::string(1, row.result)));
  return rows;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() =
      "Inspection of the compiled half of flash_attn_ext; the operators are in torch.ops.flash_attn_ext.";
  using namespace flash_attn_ext;
  for (PyMethodDef* function :
       {&kFlashAttnIfOrdinary, &kAttentionIfOrdinary, &kFlexIfOrdinary, &kVarlenIfOrdinary,
        &kCapturedRowsIfOrdinary, &kKvcacheIfOrdinary, &kWriteCacheIfOrdinary, &kReadCacheIfOrdinary})
    m.add_object(function->ml_name,
                 pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(function, nullptr)));
  pybind11::dict rows;  // of each operator's tensors
  const auto add_rows = [&rows](auto tag) {
    using Op = typename decltype(tag)::Op;
    rows[Op::kName] = rows_of(Op::Tensors::kRules);
  };
  for_each_operator(KernelOperators{}, add_rows);
  for_each_operator(PythonKernelOperators{}, add_rows);
  for_each_operator(CpuOperators{}, add_rows);
  for_each_operator(CacheWriters{}, add_rows);
  m.attr("tensor_rows") = rows;
  m.attr("program_operations") = program_operations();
  for_each_operator(KernelOperators{}, [&m](auto tag) {
    using Op = typename decltype(tag)::Op;
    m.def((std::string("run_") + Op::kName).c_str(), run_operator<Op>);
  });
  bind_indexer(m);
  m.attr("differentiable") = names(flash_attn_ext::Gradients::kNames);
  pybind11::class_<KernelChoice>(m, "KernelChoice")
      .def_readonly("kernel", &KernelChoice::kernel)
      .def_readonly("refusal", &KernelChoice::refusal)
      .def_readonly("why_not", &KernelChoice::why_not);
  pybind11::class_<PlanPart>(m, "PlanPart")
      .def_property_readonly("batch", [](const PlanPart& part) { return part.sizes.batch; })
      .def_property_readonly("seqlen_q", [](const PlanPart& part) { return part.sizes.seqlen_q; })
      .def_property_readonly("seqlen_k", [](const PlanPart& part) { return part.sizes.seqlen_k; })
      .def_readonly("decode_splits", &PlanPart::decode_splits)
      .def("visible_tiles", &PlanPart::visible_tiles);
  pybind11::class_<Plan>(m, "Plan")
      .def_readonly("choice", &Plan::choice)
      .def_readonly("bytes", &Plan::bytes)
      .def_readonly("deterministic", &Plan::deterministic)
      .def_readonly("parts", &Plan::parts);
  m.def("plan_attention", plan_of_forward<Attention>);
  m.def("plan_attention_backward", plan_of_backward<Attention, AttentionBackward>);
  m.def("plan_int8", [](const pybind11::dict& tensors, const pybind11::dict& options) {
    return flash_attn_ext::plan_int8(read<Int8Tensors>(tensors), read<Int8Options>(options));
  });
  m.def("plan_varlen", plan_of_forward<AttentionVarlen>);
  m.def("plan_varlen_backward", plan_of_backward<AttentionVarlen, AttentionVarlenBackward>);
  m.def("plan_cache", plan_of_forward<AttentionCache>);
  m.def("plan_flex", plan_of_forward<AttentionFlex>);
  m.def("plan_flex_backward", plan_of_backward<AttentionFlex, AttentionFlexBackward>);
  m.def("plan_varlen_flex", plan_of_forward<AttentionVarlenFlex>);
  m.def("plan_varlen_flex_backward", plan_of_backward<AttentionVarlenFlex, AttentionVarlenFlexBackward>);
  m.def("plan_cache_flex", plan_of_forward<AttentionCacheFlex>);
  m.def("check_append", check<AppendToCache>);
  m.def("check_cache", check<AttentionCache>);
  m.def("check_cache_flex", check<AttentionCacheFlex>);
  m.def("build_info", build_info);
  m.def("available_kernels", cpu::available_isas);
  m.def("active_kernel", [] { return std::string(cpu::active_kernels().isa); });
  m.def("kernel_calls", cpu::kernel_calls);
  m.def("force_kernel", cpu::force_isa, pybind11::arg("isa"));
  m.def("forced_cuda_tier", flash_attn_ext::cuda::forced_tier);
  m.def("activate", flash_attn_ext::torch_overrides::activate);
  m.def("deactivate", flash_attn_ext::torch_overrides::deactivate);
  m.def("is_active", flash_attn_ext::torch_overrides::is_active);
  m.def("activation_counts", flash_attn_ext::torch_overrides::counts);
  m.def("why_not_sdpa", [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& attn_mask, double dropout_p, bool is_causal,
                           std::optional<double> scale, bool enable_gqa) {
    const std::vector<c10::IValue> arguments{query,     key,       value, attn_mask,
                                             dropout_p, is_causal, scale, enable_gqa};
    const char* reason = flash_attn_ext::torch_overrides::why_not_sdpa(arguments);
    return reason ? std::optional<std::string>(reason) : std::nullopt;
  });
  m.def("reset_activation_counts", flash_attn_ext::torch_overrides::reset_counts);
  m.def("force_cuda_tier", flash_attn_ext::cuda::force_tier, pybind11::arg("tier"));
}
