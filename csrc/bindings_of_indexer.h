// The part of the module flash_attn_ext._C for tests of the indexer's kernels.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>

namespace flash_attn_ext {

// Runs kernels: run(params as bytes, {name: input}, {name: output}).
using RunFromPython =
    std::function<void(const pybind11::bytes&, const pybind11::dict&, const pybind11::dict&)>;

// Adds run_indexer_scores, run_indexer_scores_backward, run_indexer_loss and run_indexer_loss_backward.
void bind_indexer(pybind11::module_& m);

}  // namespace flash_attn_ext
