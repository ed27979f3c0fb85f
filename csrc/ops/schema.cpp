// What the dispatcher knows of the operators: names, arguments, defaults.
#include <torch/library.h>

#include "append.h"
#include "flex/flex.h"
#include "ops.h"
#include "weights.h"

namespace flash_attn_ext {

TORCH_LIBRARY(flash_attn_ext, m) {
  m.def(schema<Attention>().c_str());
  m.def(schema<AttentionBackward>().c_str());
  m.def(schema<AttentionVarlen>().c_str());
  m.def(schema<AttentionCache>().c_str());
  m.def(schema<AttentionVarlenBackward>().c_str());
  m.def(schema<AttentionVarlenJvp>().c_str());
  m.def(schema<AttentionVarlenDoubleBackward>().c_str());
  m.def(schema<AppendToCache>().c_str());
  m.def(schema<AttentionJvp>().c_str());
  m.def(schema<AttentionDoubleBackward>().c_str());
  m.def(schema<AttentionFlex>().c_str());
  m.def(schema<AttentionFlexBackward>().c_str());
  m.def(schema<AttentionWeights>().c_str());
  m.def(schema<AttentionWeightsBackward>().c_str());
  m.def(
      "dropout_mask(Tensor rng_state, SymInt batch, SymInt heads, SymInt seqlen_q, SymInt seqlen_k, "
      "float dropout_p, SymInt first_row=0) -> Tensor");
}

}  // namespace flash_attn_ext
