// The small inspection module flash_attn_ext._C. Importing it also runs the TORCH_LIBRARY registrations of
// ops/.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "cpu/select.h"
#include "cuda/tiers.h"
#include "ops/checks.h"
#include "ops/eager.h"
#include "ops/plan.h"
#include "torch_ops/overrides.h"

namespace {

namespace cpu = flash_attn_ext::cpu;
using flash_attn_ext::KernelChoice;
using flash_attn_ext::Plan;

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

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.doc() =
      "Inspection of the compiled half of flash_attn_ext; the operators are in torch.ops.flash_attn_ext.";
  m.def("attention_if_plain", flash_attn_ext::attention_if_plain);
  // Arguments of other types than that: torch.ops words the error.
  m.def("attention_if_plain", [](const pybind11::args&) { return pybind11::none(); });
  pybind11::class_<KernelChoice>(m, "KernelChoice")
      .def_readonly("kernel", &KernelChoice::kernel)
      .def_readonly("refusal", &KernelChoice::refusal)
      .def_readonly("why_not", &KernelChoice::why_not)
      .def_readonly("decode_splits", &KernelChoice::decode_splits);
  pybind11::class_<Plan>(m, "Plan")
      .def_readonly("choice", &Plan::choice)
      .def_readonly("bytes", &Plan::bytes)
      .def_readonly("deterministic", &Plan::deterministic)
      .def("visible_tiles", &Plan::visible_tiles);
  m.def("plan_attention", flash_attn_ext::plan_attention);
  m.def("plan_attention", [](const pybind11::args&) { return pybind11::none(); });  // as above
  m.def("plan_attention_backward", flash_attn_ext::plan_attention_backward);
  m.def("build_info", build_info);
  m.def("available_kernels", cpu::available_isas);
  m.def("active_kernel", [] { return std::string(cpu::active_kernels().isa); });
  m.def("kernel_calls", cpu::kernel_calls);
  m.def("force_kernel", cpu::force_isa, pybind11::arg("isa"));
  m.def("forced_cuda_tier", flash_attn_ext::cuda::forced_tier);
  m.def("activate", flash_attn_ext::torch_ops::activate);
  m.def("deactivate", flash_attn_ext::torch_ops::deactivate);
  m.def("is_active", flash_attn_ext::torch_ops::is_active);
  m.def("activation_counts", flash_attn_ext::torch_ops::counts);
  m.def("reset_activation_counts", flash_attn_ext::torch_ops::reset_counts);
  m.def("force_cuda_tier", flash_attn_ext::cuda::force_tier, pybind11::arg("tier"));
}
