// Packed sequences of different lengths: makes the call of one sequence. Torch-free, host and device.
#pragma once

#include <type_traits>

#include "host_device.h"
#include "mask.h"
#include "params.h"

namespace flash_attn_ext {

FA_HOST_DEVICE inline int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return 4;
    case DType::kFloat64: return 8;
    case DType::kBFloat16:
    case DType::kFloat16: return 2;
    case DType::kBool: break;
  }
  return 1;
}

// The rows of sequence b, clamped to the tensor: on a GPU nothing has checked the offsets before.
FA_HOST_DEVICE inline Range rows_of_sequence(const Offsets& cu_seqlens, const Offsets& seqused, int64_t b,
                                             int64_t total, int64_t longest) {
  const int64_t begin = clamp_to(cu_seqlens[b], 0, total), end = clamp_to(cu_seqlens[b + 1], begin, total);
  int64_t length = clamp_to(end - begin, 0, longest);
  if (seqused) length = clamp_to(seqused[b], 0, length);
  return {begin, begin + length};
}

// The rows in use of sequence b's cache, without its left padding.
FA_HOST_DEVICE inline Range rows_of_cache(const VarlenParams& varlen, int64_t b, int64_t capacity) {
  const int64_t end = varlen.seqused_k ? clamp_to(varlen.seqused_k[b], 0, capacity) : capacity;
  return {varlen.cache.leftpad ? clamp_to(varlen.cache.leftpad[b], 0, end) : 0, end};
}

// Moves t to its row number `rows`. A gradient that is not wanted stays null.
FA_HOST_DEVICE inline void skip_rows(Tensor4& t, int64_t rows, int64_t element_bytes) {
  if (t) t.data = static_cast<char*>(t.data) + rows * t.stride_s * element_bytes;
}

// The call of sequence b: batch size 1, lengths and diagonal of the sequence, tensors that begin at its first row. Masks,
// slopes and dropout still use the number b. Without packing, returns p unchanged.
template <class Params>
FA_HOST_DEVICE Params of_sequence(Params p, int64_t b) {
  if (!p.varlen) return p;
  VarlenParams& varlen = p.varlen;
  const int64_t bytes = bytes_of(p.dtype);
  const Range q =
      rows_of_sequence(varlen.cu_seqlens_q, varlen.seqused_q, b, varlen.total_q, p.sizes.seqlen_q);
  const bool is_cache = !varlen.cu_seqlens_k;
  const Range k =
      is_cache ? rows_of_cache(varlen, b, p.sizes.seqlen_k)
               : rows_of_sequence(varlen.cu_seqlens_k, varlen.seqused_k, b, varlen.total_k, p.sizes.seqlen_k);
  varlen.first_q = q.begin;
  varlen.first_k = k.begin;
  p.sizes.batch = 1;
  p.sizes.seqlen_q = q.end - q.begin;
  p.sizes.seqlen_k = k.end - k.begin;
  if (varlen.lower_right) p.band.diagonal += p.sizes.seqlen_k - p.sizes.seqlen_q;
  if (p.mask && varlen.mask_by_row)
    p.mask.data = static_cast<const char*>(p.mask.data) + q.begin * p.mask.stride_q * bytes_of(p.mask.dtype);
  skip_rows(p.q, q.begin, bytes);
  skip_rows(p.out, q.begin, bytes);
  if (is_cache) {
    CacheParams& cache = varlen.cache;
    const int64_t cache_bytes = cache.dtype == CacheDType::kOfQuery ? bytes : 1;
    cache.pages.sequence = b;
    cache.cache = clamp_to(cache.batch_idx ? cache.batch_idx[b] : b, 0, cache.caches - 1);
    cache.first_masked = p.sizes.seqlen_k - p.sizes.seqlen_q;
    if (!cache.pages) {  // k and v become the sequence's cache. Pages are looked up row by row
      p.k.data = static_cast<char*>(p.k.data) + cache.cache * p.k.stride_b * cache_bytes;
      p.v.data = static_cast<char*>(p.v.data) + cache.cache * p.v.stride_b * cache_bytes;
      p.k.stride_b = p.v.stride_b = 0;
      skip_rows(p.k, k.begin, cache_bytes);
      skip_rows(p.v, k.begin, cache_bytes);
    }
  } else {
    skip_rows(p.k, k.begin, bytes);
    skip_rows(p.v, k.begin, bytes);
  }
  if constexpr (std::is_base_of_v<BackwardParams, Params>) {
    skip_rows(p.dout, q.begin, bytes);
    skip_rows(p.dq, q.begin, bytes);
    skip_rows(p.dk, k.begin, bytes);
    skip_rows(p.dv, k.begin, bytes);
  }
  if constexpr (std::is_same_v<Params, JvpParams> || std::is_same_v<Params, DoubleBackwardParams>) {
    Tangents& t = p.tangents;
    if (t.mask && varlen.mask_by_row)
      t.mask.data =
          static_cast<const char*>(t.mask.data) + q.begin * t.mask.stride_q * bytes_of(t.mask.dtype);
    skip_rows(t.q, q.begin, bytes);
    skip_rows(t.k, k.begin, bytes);
    skip_rows(t.v, k.begin, bytes);
    skip_rows(p.t_out, q.begin, bytes);
  }
  return p;
}

}  // namespace flash_attn_ext
