// Autograd key of attention by index.

#include "../autograd/derivatives.h"
#include "../declarations/library.h"
#include "indexed.h"

namespace flash_attn_ext {
namespace {

struct IndexedFamily {
  static constexpr const char* kName = "flash_attn";
  using Gradients = flash_attn_ext::Gradients;
  using InputTangents = flash_attn_ext::InputTangents;
  using Forward = AttentionIndexed;
  using Backward = AttentionIndexedBackward;
  using Jvp = AttentionIndexedJvp;
  using DoubleBackward = AttentionIndexedDoubleBackward;
};

// Checks while gradients are enabled: the mask may not need one.
AttentionResult indexed(const IndexedTensors& given, const IndexedOptions& options) {
  AttentionIndexed::check(given, options);
  return Derivatives<IndexedFamily>::forward(given, options);
}

}  // namespace

FA_LIBRARY_IMPL(Autograd, m) {
  using Derivatives = Derivatives<IndexedFamily>;
  implement<AttentionIndexed, indexed>(m);
  implement<AttentionIndexedBackward, Derivatives::backward>(m);
  implement<AttentionIndexedJvp, Derivatives::jvp>(m);
  implement<AttentionIndexedDoubleBackward, Derivatives::double_backward>(m);
}

}  // namespace flash_attn_ext
