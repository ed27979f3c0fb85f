// The workspace of the backward with functions of the user.
#pragma once

#include "../simt/functions.h"
#include "backward_schedule.h"

namespace flash_attn_ext::cuda::sm80 {

// The head dimension of the kernel: 64, 192 or 256. The registers of the kernel for 128 do not suffice for a program,
// and the registers of the kernel for 64 do not suffice for a function on scores. Such a function takes most of the time,
// so the columns of zeros matter little.
inline int flex_padded_head_dim(const BackwardParams& p) {
  const int padded = padded_head_dim(p.sizes);
  return padded == 128 || (padded == 64 && p.functions->score) ? 192 : padded;
}

struct FlexBackwardWorkspace {
  simt::FlexBackwardWorkspace<float> simt;
  BackwardWorkspace tier;

  static FlexBackwardWorkspace lay_out(Arena& arena, const BackwardParams& p) {
    FlexBackwardWorkspace w;
    w.simt = simt::FlexBackwardWorkspace<float>::lay_out(arena, p);
    w.tier = BackwardWorkspace::lay_out_after(w.simt, arena, p, flex_padded_head_dim(p));
    return w;
  }
};

}  // namespace flash_attn_ext::cuda::sm80
