// Checks the options by their rows.
#include "../cache/append.h"
#include "../weights/weights.h"

namespace flash_attn_ext {
namespace {

// The value of an option in a message.
template <class T>
const T& shown(const T& value) {
  return value;
}
template <class T>
T shown(const std::optional<T>& value) {
  return value.value_or(T(0));
}

}  // namespace

#define FA_CHECK_OPTION(name, type, default_value, check, allowed)                 \
  {                                                                                \
    [[maybe_unused]] const auto& v = name;                                         \
    TORCH_CHECK_VALUE(check, #name ": got ", shown(name), "; allowed: ", allowed); \
  }

void AttentionOptions::check() const { FA_ATTENTION_OPTIONS(FA_CHECK_OPTION) }
void AttentionBackwardOptions::check() const { forward().check(); }
void WeightsOptions::check() const { attention().check(); }
void WeightsBackwardOptions::check() const { forward().check(); }
void VarlenOptions::check() const {
  attention().check();
  FA_MAX_SEQLEN_OPTIONS(FA_CHECK_OPTION)
}
void VarlenBackwardOptions::check() const { forward().check(); }
void CacheOptions::check() const {
  attention().check();
  FA_MAX_SEQLEN_Q_OPTION(FA_CHECK_OPTION)
  TORCH_CHECK_VALUE(dropout_p == 0.0, "dropout_p: got ", dropout_p, "; allowed with a cache: 0");
}
void AppendOptions::check() const {}  // bools

#undef FA_CHECK_OPTION

}  // namespace flash_attn_ext
