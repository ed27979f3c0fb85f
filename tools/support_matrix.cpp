// Prints the options that each kernel supports: a line for each row of the table in docs/support.md.
// tools/support_matrix.py compiles and runs this file. The answers come from the functions that the selectors call:
// cpu::why_not, and why_not_* of simt, sm75, sm80 and sm90.
#include <cstdio>
#include <functional>
#include <string>

#include "core/program.h"
#include "cpu/why_not.h"
#include "cuda/simt/flex.h"
#include "cuda/simt/simt.h"
#include "cuda/sm75/sm75.h"
#include "cuda/sm80/sm80.h"
#include "cuda/sm90/sm90.h"

namespace {

using namespace flash_attn_ext;
using Change = std::function<void(AttentionParams&)>;

alignas(16) char data[64];  // the address of every tensor; it is never read

// A call that every kernel supports: bfloat16, one batch, 2 heads, 256 queries and keys, head dimension 64.
template <class Params>
Params call() {
  Params p;
  p.dtype = DType::kBFloat16;
  p.sizes = {1, 2, 2, 256, 256, 64, 64};
  p.scale = 0.125;
  p.q = p.k = p.v = p.out = {data, 1 << 22, 1 << 18, 1 << 9};
  p.lse = data;
  return p;
}

template <class Params>
Params gradients(Params p) {
  p.dout = p.dq = p.dk = p.dv = p.out;
  return p;
}

// sm75 takes float16 only: its column has float16 where the other columns have bfloat16.
template <class Params>
Params in_float16(Params p) {
  if (p.dtype == DType::kBFloat16) p.dtype = DType::kFloat16;
  return p;
}

// One letter for each pass that supports the call: F forward, B backward, J forward mode, D double backward.
std::string cell(const char* forward, const char* backward, const char* jvp, const char* double_backward) {
  std::string letters;
  if (!forward) letters += "F";
  if (!backward) letters += "B";
  if (!jvp) letters += "J";
  if (!double_backward) letters += "D";
  return letters.empty() ? "-" : letters;
}

void row(const char* function, const char* option, const char* meaning, const Change& change) {
  AttentionParams forward = call<AttentionParams>();
  change(forward);
  BackwardParams backward;
  JvpParams jvp;
  DoubleBackwardParams second;
  for (AttentionParams* p : {static_cast<AttentionParams*>(&backward), static_cast<AttentionParams*>(&jvp),
                             static_cast<AttentionParams*>(&second)})
    *p = forward;
  backward = gradients(backward);
  second = gradients(second);
  jvp.tangents.q = jvp.tangents.k = jvp.tangents.v = jvp.t_out = forward.q;

  // simt is the last tier. If it does not support a forward, no GPU does, so no other pass can follow.
  const bool is_cache = forward.varlen && !forward.varlen.cu_seqlens_k;
  const char* no_cuda = cuda::simt::why_not_forward(forward);
  const char* no_gradient = is_cache ? "a cache has no derivatives" : no_cuda;
  const auto either = [](const char* first, const char* other) { return first ? first : other; };
  const char* none = "no such kernels";
  const char* no_functions = forward.functions ? none : nullptr;
  std::printf(
      "%s|%s|%s|%s|%s|%s|%s|%s\n", function, option, meaning,
      cell(cpu::why_not(forward), cpu::why_not(backward), cpu::why_not(jvp), cpu::why_not(second)).c_str(),
      cell(no_cuda, either(no_gradient, cuda::simt::why_not_functions(backward)),
           either(no_gradient, no_functions), either(no_gradient, no_functions))
          .c_str(),
      cell(either(no_cuda, cuda::sm75::why_not_forward(in_float16(forward))),
           either(no_gradient, cuda::sm75::why_not_backward(in_float16(backward))), none, none)
          .c_str(),
      cell(either(no_cuda, cuda::sm80::why_not_forward(forward)),
           either(no_gradient, cuda::sm80::why_not_backward(backward)),
           either(no_gradient, cuda::sm80::why_not_jvp(jvp)), none)
          .c_str(),
      cell(either(no_cuda, cuda::sm90::why_not_forward(forward)),
           either(no_gradient, cuda::sm90::why_not_backward(backward)), none, none)
          .c_str());
}

Change head_dims(int64_t head_dim, int64_t head_dim_v) {
  return [=](AttentionParams& p) { p.sizes.head_dim = head_dim, p.sizes.head_dim_v = head_dim_v; };
}
Change dtype(DType type) {
  return [=](AttentionParams& p) { p.dtype = type; };
}
Change mask(DType type, int64_t stride_h, int64_t stride_q) {
  return [=](AttentionParams& p) { p.mask = {data, type, 0, stride_h, stride_q, 1}; };
}

void cache_of(AttentionParams& p) {
  p.varlen.cu_seqlens_q = p.varlen.seqused_k = {data, false};
  p.varlen.total_q = 256, p.varlen.total_k = 1000;
  p.varlen.cache.caches = 1;
}

void dense() {
  const char* f = "flash_attn";
  row(f, "query, key, value", "bfloat16 or float16", [](AttentionParams&) {});
  row(f, "", "float32", dtype(DType::kFloat32));
  row(f, "", "float64", dtype(DType::kFloat64));
  row(f, "", "head dimension 128", head_dims(128, 128));
  row(f, "", "head dimension 136 to 256, a multiple of 8", head_dims(256, 256));
  row(f, "", "head dimension above 256", head_dims(264, 264));
  row(f, "", "head dimension that is not a multiple of 8", head_dims(60, 60));
  row(f, "", "another head dimension of value: 192 and 128", head_dims(192, 128));
  row(f, "", "data not aligned to 16 bytes", [](AttentionParams& p) { p.q.data = data + 2; });
  row(f, "", "at most 16 queries", [](AttentionParams& p) { p.sizes.seqlen_q = 16; });
  row(f, "enable_gqa", "fewer key heads", [](AttentionParams& p) { p.sizes.heads_kv = 1; });
  row(f, "is_causal, causal", "either corner", [](AttentionParams& p) { p.band.right = 0; });
  row(f, "diagonal", "", [](AttentionParams& p) { p.band.right = 0, p.band.diagonal = 7; });
  row(f, "window", "", [](AttentionParams& p) { p.band.left = 64, p.band.right = 0; });
  row(f, "attention_chunk", "", [](AttentionParams& p) { p.band.chunks = {100, 0}; });
  row(f, "scale", "zero or negative", [](AttentionParams& p) { p.scale = -1; });
  row(f, "softcap", "", [](AttentionParams& p) { p.softcap = 30; });
  row(f, "attn_mask", "bool, the same for all heads and queries", mask(DType::kBool, 0, 0));
  row(f, "", "bool, different by head or query", mask(DType::kBool, 0, 256));
  row(f, "", "float", mask(DType::kFloat32, 0, 0));
  row(f, "key_mask", "bool", mask(DType::kBool, 0, 0));
  row(f, "", "float", mask(DType::kFloat32, 0, 0));
  row(f, "alibi_slopes", "", [](AttentionParams& p) { p.alibi = {data, 0, 1}; });
  row(f, "sink", "", [](AttentionParams& p) { p.sink = {data, 0, 1}; });
  const auto dropout = [](AttentionParams& p) {
    p.dropout.rng_state = reinterpret_cast<const int64_t*>(data);
  };
  row(f, "dropout_p, rng_state", "", dropout);
  row(f, "", "rng_state of a part of a larger call", [&](AttentionParams& p) {
    dropout(p);
    p.dropout.place = reinterpret_cast<const int64_t*>(data);
  });
  row(f, "num_splits", "", [](AttentionParams& p) { p.decode.num_splits = 4; });
  row(f, "unified_max", "", [](AttentionParams& p) { p.decode.has_unified_max = true; });
  row(f, "q_descale, k_descale, v_descale", "float8_e4m3fn tensors", [](AttentionParams& p) {
    cache_of(p);
    p.varlen.cache.dtype = CacheDType::kFloat8E4M3;
    p.varlen.cache.float8_products = true;
  });
  static constexpr int64_t program[Program::kHeaderWords] = {Program::kVersion};  // no instructions
  static UserFunctions masks, scores;
  masks.mask.words = scores.score.words = program;
  row(f, "mask_mod, block_mask", "", [](AttentionParams& p) { p.functions = &masks; });
  row(f, "score_mod", "", [](AttentionParams& p) { p.functions = &scores; });
}

void pack(AttentionParams& p) {
  p.varlen.cu_seqlens_q = p.varlen.cu_seqlens_k = {data, false};
  p.varlen.total_q = p.varlen.total_k = 1000;
}

void packed() {
  const char* f = "flash_attn_varlen";
  row(f, "cu_seqlens_q, cu_seqlens_k", "and options as above", pack);
  row(f, "seqused_q, seqused_k", "", [](AttentionParams& p) {
    pack(p);
    p.varlen.seqused_q = p.varlen.seqused_k = {data, false};
  });
  row(f, "attn_mask", "bool, by sequence", [](AttentionParams& p) { pack(p), mask(DType::kBool, 0, 0)(p); });
  row(f, "", "bool, by row", [](AttentionParams& p) {
    pack(p), mask(DType::kBool, 0, 256)(p);
    p.varlen.mask_by_row = true;
  });
}

void cached() {
  const char* f = "flash_attn_with_kvcache";
  row(f, "k_cache, v_cache", "contiguous", cache_of);
  row(f, "block_table", "pages", [](AttentionParams& p) {
    cache_of(p);
    p.varlen.cache.pages = {{data, false}, 4, 16, 64};
  });
  row(f, "k_descale, v_descale", "int8 or float8 caches", [](AttentionParams& p) {
    cache_of(p);
    p.varlen.cache.dtype = CacheDType::kInt8;
  });
  row(f, "k_scales, v_scales, k_zeros, v_zeros", "int4 caches", [](AttentionParams& p) {
    cache_of(p);
    p.varlen.cache.dtype = CacheDType::kInt4;
  });
  row(f, "qv", "separate caches", [](AttentionParams& p) {
    cache_of(p);
    p.varlen.cache.key_has_value = true;
  });
  row(f, "cache_format", "\"flashmla_fp8\"", [](AttentionParams& p) {
    cache_of(p);
    p.varlen.cache.dtype = CacheDType::kLatent;
  });
  row(f, "tree_mask", "", [](AttentionParams& p) {
    cache_of(p), mask(DType::kBool, 0, 256)(p);
    p.varlen.cache.tree_mask = true;
  });
}

}  // namespace

int main() {
  dense();
  packed();
  cached();
}
