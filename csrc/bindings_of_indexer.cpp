// Runs the indexer's operators with other kernels: tests/cuda_host. Everything else is the code of the CUDA key.
#include "bindings_of_indexer.h"

#include <optional>
#include <vector>

#include "ops/indexer/indexer.h"

namespace flash_attn_ext {
namespace {

using Results = std::vector<std::optional<at::Tensor>>;
using pybind11::dict;

at::Tensor tensor(const dict& by_name, const char* name) { return by_name[name].cast<at::Tensor>(); }

indexer::OptionalTensor tensor_or_none(const dict& by_name, const char* name) {
  if (!by_name.contains(name) || by_name[name].is_none()) return std::nullopt;
  return tensor(by_name, name);
}

std::optional<c10::SymInt> number_or_none(const dict& by_name, const char* name) {
  if (by_name[name].is_none()) return std::nullopt;
  return by_name[name].cast<int64_t>();
}

indexer::Inputs inputs(const dict& by_name) {
  return {tensor(by_name, "q"),
          tensor(by_name, "k"),
          tensor(by_name, "weights"),
          tensor_or_none(by_name, "key_mask"),
          std::nullopt,
          std::nullopt};
}

indexer::MainInputs main_inputs(const dict& by_name) {
  return {tensor(by_name, "query"), tensor(by_name, "key"), tensor(by_name, "lse")};
}

double scale(const dict& options) { return options["scale"].cast<double>(); }

indexer::LossOptions loss_options(const dict& options) {
  return {scale(options),
          options["main_scale"].cast<double>(),
          {options["causal"].cast<bool>(), options["lower_right"].cast<bool>(),
           number_or_none(options, "window_left"), number_or_none(options, "window_right"),
           options["diagonal"].cast<int64_t>()}};
}

// Calls `run` with packed params.
struct Runner {
  const RunFromPython& run;

  template <class Params>
  void operator()(const Params& params, const indexer::KernelTensors& tensors) const {
    dict read, written;
    for (const auto& [name, t] : tensors.read) read[name] = t;
    for (const auto& [name, t] : tensors.written) written[name] = t;
    run(pybind11::bytes(reinterpret_cast<const char*>(&params), sizeof(params)), read, written);
  }
};

template <class Tuple>
Results as_list(const Tuple& results) {
  return std::apply([](const auto&... t) { return Results{t...}; }, results);
}

Results run_scores(const dict& tensors, const dict& options, const RunFromPython& run) {
  const indexer::Inputs in = inputs(tensors);
  const at::Tensor indices = tensor(tensors, "indices");
  check_inputs(in);
  check_chosen(in, indices);
  return {compute_scores(in, indices, scale(options), Runner{run})};
}

Results run_scores_backward(const dict& tensors, const dict& options, const RunFromPython& run) {
  const indexer::Inputs in = inputs(tensors);
  const at::Tensor indices = tensor(tensors, "indices"), grad = tensor(tensors, "grad");
  check_inputs(in);
  check_chosen(in, indices);
  check_rows("grad", grad, in, indices.sym_size(3));
  return as_list(compute_scores_backward(grad, in, indices, scale(options), Runner{run}));
}

Results run_loss(const dict& tensors, const dict& options, const RunFromPython& run) {
  const indexer::Inputs in = inputs(tensors);
  const indexer::MainInputs main = main_inputs(tensors);
  const indexer::OptionalTensor indices = tensor_or_none(tensors, "indices");
  check_loss(in, main, indices);
  return as_list(compute_loss(in, main, indices, loss_options(options), Runner{run}));
}

Results run_loss_backward(const dict& tensors, const dict& options, const RunFromPython& run) {
  const indexer::Inputs in = inputs(tensors);
  const indexer::MainInputs main = main_inputs(tensors);
  const indexer::OptionalTensor indices = tensor_or_none(tensors, "indices");
  const indexer::LossGradients grad{tensor(tensors, "grad_loss"), tensor(tensors, "index_lse"),
                                    tensor(tensors, "mass")};
  check_loss(in, main, indices);
  check_loss_gradients(in, grad);
  return as_list(compute_loss_backward(grad, in, main, indices, loss_options(options), Runner{run}));
}

}  // namespace

void bind_indexer(pybind11::module_& m) {
  m.def("run_indexer_scores", run_scores);
  m.def("run_indexer_scores_backward", run_scores_backward);
  m.def("run_indexer_loss", run_loss);
  m.def("run_indexer_loss_backward", run_loss_backward);
}

}  // namespace flash_attn_ext
