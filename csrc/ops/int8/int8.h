// Declares attention with integer products, with the rows of dense/attention.h. The operator has no derivatives.
#pragma once

#include "../../core/int8.h"
#include "../dense/attention.h"

namespace flash_attn_ext {

#define FA_INT8_TENSORS(X) \
  FA_DIFFERENTIABLE(X)     \
  FA_KEY_MASK_ROW(X)

struct Int8Tensors {
  FA_TENSOR_FIELDS(FA_INT8_TENSORS, same_rule)
  AttentionTensors attention() const;
};
struct Int8Options {
  FA_OPTION_FIELDS(FA_SCORE_OPTIONS_BEFORE_DROPOUT)
  AttentionOptions attention() const;
};
struct AttentionInt8 : OperatorTypes<Int8Tensors, Int8Options, AttentionResult, Int8Params> {
  static constexpr const char* kName = "attention_int8";
  FA_OPERATOR_STEPS(AttentionInt8)
};

}  // namespace flash_attn_ext
