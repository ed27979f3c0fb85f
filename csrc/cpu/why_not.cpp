#include "why_not.h"

namespace flash_attn_ext::cpu {
namespace {

// All kernels read every field, except the fields of caches. The binding below names all fields. After a new field,
// this file does not compile until the author adds the field here and decides which kernels support it.
const char* why_not_any(const AttentionParams& p) {
  const auto& [dtype, sizes, q, k, v, out, lse, scale, softcap, band, mask, alibi, sink, dropout, decode,
               varlen, functions] = p;
  if (dtype == DType::kBool) return "cpu: no kernel for query's dtype";
  if (sizes.heads_kv < 1 || sizes.heads % sizes.heads_kv != 0)
    return "cpu: the heads of key do not divide those of query";
  return nullptr;
}

// Keys in a cache may be in pages or have 8 bits. The derivatives do not read caches.
const char* why_not_differentiated(const AttentionParams& p) {
  if (p.varlen && !p.varlen.cu_seqlens_k) return "cpu: caches have no derivatives";
  return why_not_any(p);
}

const char* why_not_functions(const AttentionParams& p) {
  return p.functions ? "cpu: functions of the user have a forward and a backward, and no other pass"
                     : nullptr;
}

}  // namespace

const char* why_not(const AttentionParams& p) { return why_not_any(p); }
const char* why_not(const BackwardParams& p) {
  if (p.varlen && p.dweights) return "cpu: no kernel for the weights of packed sequences";
  return why_not_differentiated(p);
}
const char* why_not(const JvpParams& p) {
  if (const char* reason = why_not_functions(p)) return reason;
  return why_not_differentiated(p);
}
const char* why_not(const DoubleBackwardParams& p) {
  if (const char* reason = why_not_functions(p)) return reason;
  if (p.dweights) return "cpu: no kernel for second derivatives of the weights";
  return why_not_differentiated(p);
}
const char* why_not(const Int8Params& p) {
  if (p.dtype == DType::kFloat64 || p.functions || p.dropout || p.varlen)
    return "cpu: no kernel with integer products for float64, functions, dropout and packed sequences";
  return why_not_any(p);
}
const char* why_not(const WeightsParams& p) {
  if (const char* reason = why_not_functions(p)) return reason;
  if (p.varlen) return "cpu: no kernel for the weights of packed sequences";
  return why_not_any(p);
}

}  // namespace flash_attn_ext::cpu
