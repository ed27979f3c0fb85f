// The elements of the score matrix that the user's mask function, a block mask or a key mask hides.
#pragma once

#include "../shown_tiles.cuh"
#include "../simt/functions.cuh"
#include "nan_rows.cuh"

namespace flash_attn_ext::cuda::sm90 {

// Every key of a visited tile may be hidden from some query.
struct HiddenByFunctions {
  static constexpr bool kHidesAnywhere = true, kChangesScores = false;

  const simt::DeviceFunctions* functions;

  __device__ bool hides(const AttentionParams& p, int64_t b, int64_t h, int64_t i, int64_t j) const {
    return is_masked(p, b, j) || !simt::is_shown<float>(*functions, {b, h, i, j, 0, 0}, 0);
  }
};

// The same with a score function. The function changes the scores of shown elements.
struct ScoredByFunctions : HiddenByFunctions {
  static constexpr bool kChangesScores = true;

  __device__ float new_score(const simt::ProgramPoint<float>& at) const {
    return simt::number_of<float>(simt::run_program(functions, functions->score, at));
  }
};

// Whether an element of a tile that is not full is shown.
__device__ inline bool shows_element(const simt::DeviceFunctions* functions, TileState state,
                                     const simt::ProgramPoint<float>& at) {
  return state == TileState::kPartial ? simt::run_program(functions, functions->mask, at) != 0
                                      : simt::is_shown(*functions, at, 0);
}

}  // namespace flash_attn_ext::cuda::sm90
