// The arguments of the kernels: raw pointers, sizes and strides. Torch-free, shared by every device.
//
// Letters in the comments: B batch, H query heads, H_kv key/value heads, S_q and S_k sequence lengths. D is the head
// dimension of q and k, D_v of v and out. H % H_kv == 0, and query head h reads key/value head h / (H / H_kv).
// Strides are in elements, never bytes.
// A new feature is a new small struct here, and ops/dense/pack_params.cpp fills it.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flash_attn_ext {

enum class DType : int8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kBool };

// Softmax statistics and accumulators are fp32; for fp64 inputs they are fp64. "acc" below is this type.

struct Sizes {
  int64_t batch = 0;       // B
  int64_t heads = 0;       // H
  int64_t heads_kv = 0;    // H_kv
  int64_t seqlen_q = 0;    // S_q
  int64_t seqlen_k = 0;    // S_k
  int64_t head_dim = 0;    // D
  int64_t head_dim_v = 0;  // D_v

  FA_HOST_DEVICE int64_t kv_head(int64_t head) const { return head / (heads / heads_kv); }
};

// A (B, heads, S, D) tensor with a contiguous last dimension. The other strides are free.
struct Tensor4 {
  void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_s = 0;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  template <class T>
  FA_HOST_DEVICE T* row(int64_t b, int64_t h, int64_t s) const {
    return static_cast<T*>(data) + b * stride_b + h * stride_h + s * stride_s;
  }
};

// The elements (i, j) of the score matrix that causal and window leave visible:
//   -left <= j - (i + diagonal) <= right
struct DiagonalBand {
  static constexpr int64_t kUnbounded = int64_t{1} << 60;
  int64_t diagonal = 0;        // 0: upper-left aligned; S_k - S_q: lower-right aligned
  int64_t left = kUnbounded;   // keys before the diagonal that stay visible
  int64_t right = kUnbounded;  // keys after it; 0 is causal
};

// Chunked attention (Llama 4, 2025; attention_chunk of FlashAttention-3): positions are cut into chunks, and a query sees
// only keys of its own chunk.
//   floor((i + diagonal + first_key) / size) == floor((j + first_key) / size)
struct Chunks {
  static constexpr int64_t kLargest = int64_t{1} << 61;
  int64_t size = 0;       // 0: off
  int64_t first_key = 0;  // position of key 0, in a part of a larger score matrix

  FA_HOST_DEVICE explicit operator bool() const { return size != 0; }
  // Returns the first position of the chunk of a position, which may be negative. Both count from key 0.
  FA_HOST_DEVICE int64_t begin(int64_t position) const {
    const int64_t in_chunk = (position + first_key) % size;
    return position - (in_chunk < 0 ? in_chunk + size : in_chunk);
  }
  FA_HOST_DEVICE bool same(int64_t a, int64_t b) const {
    if (size == 0) return true;
    const int64_t distance = b - begin(a);
    return 0 <= distance && distance < size;
  }
};

struct Band : DiagonalBand {
  Chunks chunks;

  // For kernels that refuse chunks in their why_not: the overloads of mask.h without chunks.
  FA_HOST_DEVICE const DiagonalBand& without_chunks() const { return *this; }
};

// attn_mask, broadcast by zero strides: never expanded. kBool: true attends. Float: added; -inf hides the key.
//
// A second mask, key_mask, has one element for each key of a batch. A key is hidden if either mask hides it. Otherwise
// both values are added. If the caller gave only key_mask, `data` points to it, and key_data is null.
struct MaskParams {
  const void* data = nullptr;  // null: no mask
  DType dtype = DType::kBool;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
  const void* key_data = nullptr;  // null: one mask, or none
  DType key_dtype = DType::kBool;
  int64_t key_stride_b = 0, key_stride_k = 0;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  // Whether each visible key keeps its score.
  FA_HOST_DEVICE bool only_masks() const {
    return dtype == DType::kBool && (!key_data || key_dtype == DType::kBool);
  }
  // Returns the second mask as the first mask of a call.
  MaskParams of_keys() const {
    MaskParams keys;
    keys.data = key_data;
    keys.dtype = key_dtype;
    keys.stride_b = key_stride_b;
    keys.stride_k = key_stride_k;
    return keys;
  }
};

// ALiBi (Press et al. 2022): score += -slope * |i + diagonal - j|, slopes in acc type, (H) or (B, H) by
// strides.
struct AlibiParams {
  const void* slopes = nullptr;  // null: no ALiBi
  int64_t stride_b = 0, stride_h = 0;

  FA_HOST_DEVICE explicit operator bool() const { return slopes != nullptr; }
};

// An attention sink (gpt-oss, 2025): one more column of the softmax in each head, a score without a value:
// lse = log(exp(sink) + sum exp(s)). Acc type, (H) or (B, H) by strides; -inf is no sink.
struct SinkParams {
  const void* data = nullptr;  // null: no sink
  int64_t stride_b = 0, stride_h = 0;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  template <class T>
  FA_HOST_DEVICE T of(int64_t b, int64_t h) const {
    return static_cast<const T*>(data)[b * stride_b + h * stride_h];
  }
};

// Dropout of P. Forward and backward keep element (b, h, i, j) if its Philox word (core/philox.h) is at least
// `threshold`. The state is a pointer, so that a captured CUDA graph reads fresh values at each replay.
//
// A call can compute a part of a larger call and drop the same elements. Then place = {row, column, head, heads}: the
// part's first element in the larger call, and the number of heads of the larger call. Attention by index has one place
// for each row of query instead, because its rows can belong to different sequences.
struct DropoutParams {
  const int64_t* rng_state = nullptr;  // {seed, offset}, on the kernel's device; null: no dropout
  const int64_t* place = nullptr;      // on the same device; null: not a part of a larger call
  uint64_t threshold = 0;              // round(p * 2^32)
  double keep_scale = 1.0;             // 1 / (1 - p); 0 if p == 1
  int64_t place_stride = 0;            // from the place of a row to the next row's; 0: one place

  FA_HOST_DEVICE explicit operator bool() const { return rng_state != nullptr; }
  FA_HOST_DEVICE int64_t row(int64_t i) const { return place ? place[0] + i : i; }
  FA_HOST_DEVICE int64_t col(int64_t j) const { return place ? place[1] + j : j; }
  FA_HOST_DEVICE int64_t head(int64_t b, int64_t h, int64_t heads) const {
    return place ? b * place[3] + place[2] + h : b * heads + h;
  }
  // The same with the place of row i.
  FA_HOST_DEVICE DropoutParams at_row(int64_t i) const {
    DropoutParams own = *this;
    if (place_stride != 0) own.place += i * place_stride;
    return own;
  }
};

// How the forward for few queries cuts the keys (Flash-Decoding). If the caller gives either option, this kernel runs for
// any number of queries.
struct DecodeParams {
  int64_t num_splits = 0;        // maximum number of pieces of the keys; 0: the shape decides
  bool has_unified_max = false;  // FlashDecoding++: exp(score - unified_max) in place of the running maximum
  double unified_max = 0.0;
};

// Row numbers or lengths on the kernel's device, int32 or int64.
struct Offsets {
  const void* data = nullptr;
  bool is_int64 = false;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  FA_HOST_DEVICE int64_t operator[](int64_t n) const {
    return is_int64 ? static_cast<const int64_t*>(data)[n] : static_cast<const int32_t*>(data)[n];
  }
};

// Keys and values in pages. Row j of a sequence is row j % page_size of the sequence's page number j / page_size.
// stride_b of k and v is the distance of two pages.
struct PageTable {
  Offsets pages;          // (B, count), contiguous; null: the rows of a sequence are adjacent
  int64_t count = 0;      // pages of a sequence
  int64_t page_size = 0;  // rows
  int64_t num_pages = 0;  // of the cache; a page number outside of it is clamped
  int64_t sequence = 0;   // in the call of one sequence: the sequence's row of the table

  FA_HOST_DEVICE explicit operator bool() const { return bool(pages); }
  FA_HOST_DEVICE int64_t page_of(int64_t row) const {
    const int64_t page = pages[sequence * count + row / page_size];
    return page < 0 ? 0 : page < num_pages ? page : num_pages - 1;
  }
};

// kInt4: bytes of two columns. The low nibble is column 2c, the high nibble column 2c + 1. An element is
// scale * (nibble - zero), with the numbers of CacheGroups.
//
// kLatent: FlashMLA's row of 656 bytes for multi-head latent attention, D 576 and D_v 512. 512 columns of float8_e4m3, four
// float32 factors of 128 columns each, then 64 columns of bfloat16. The value is the first 512 columns of the key.
enum class CacheDType : int8_t { kOfQuery, kInt8, kFloat8E4M3, kFloat8E5M2, kLatent, kInt4 };
constexpr int64_t kLatentColumns = 512, kRotaryColumns = 64, kLatentGroup = 128, kLatentRowBytes = 656;

// The factors of 8-bit keys or values: float32, broadcast by zero strides. b is the number of the cache or of the page,
// s the row in it.
struct CacheScale {
  const float* data = nullptr;  // null: 1
  int64_t stride_b = 0, stride_h = 0, stride_s = 0;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  FA_HOST_DEVICE float at(int64_t b, int64_t h, int64_t s) const {
    return data[b * stride_b + h * stride_h + s * stride_s];
  }
};

// The scales and zero points of int4 keys or values, (caches or pages, rows, H_kv, groups), float16 or float32. A row's
// groups are adjacent. All groups have the same number of columns: a multiple of 32, or the whole row.
struct CacheGroups {
  Tensor4 scales, zeros;  // zeros null: 8
  int64_t count = 0;      // groups of a row
  int64_t columns = 0;    // of a group
  bool is_float16 = false;
};
constexpr float kInt4Zero = 8;  // without zero points

// Keys and values in caches of S_k rows. Sequence b fills the first seqused_k[b] rows of its cache.
struct CacheParams {
  Offsets batch_idx;  // (B): the cache of each sequence; null: cache b for sequence b
  Offsets leftpad;    // (B): the number of hidden rows at the start; null: 0
  int64_t caches = 0;
  CacheDType dtype = CacheDType::kOfQuery;  // of k and v
  CacheScale k_scale, v_scale;
  CacheGroups k_groups, v_groups;  // of kInt4
  PageTable pages;
  int64_t cache = 0;  // in the call of one sequence: the sequence's cache
  // The mask has a column for each of the last S_q keys, which are the keys of the queries. All earlier keys are visible.
  bool tree_mask = false;
  int64_t first_masked = 0;  // in the call of one sequence: the key of column 0, S_k - S_q
  // k and v are kFloat8E4M3, each element of q is a float8_e4m3fn number, and in a sequence k_scale and v_scale depend on the
  // head alone. So a kernel may use products of float8, which round P to 8 bits.
  bool float8_products = false;
  // A key is a row of k, D - D_v columns, and then the row of v. Not with 8 bits.
  bool key_has_value = false;
};

// Packed sequences of different lengths. Sequence b has the rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of q, out and
// their gradients, and the rows of k and v by cu_seqlens_k. stride_b is 0. B is the number of sequences, S_q and S_k
// are the longest lengths, and lse is (H, T_q). Masks, slopes and dropout use the indices of a padded call: the number of
// the sequence, and rows and columns from its start.
//
// core/sequence.h makes the call of one sequence. The CPU kernels and every CUDA tier read these params;
// sm90 refuses caches by name.
struct VarlenParams {
  Offsets cu_seqlens_q;              // (B + 1), ascending from 0 to T_q; null: no packing
  Offsets cu_seqlens_k;              // (B + 1), ascending from 0 to T_k; null: k and v are caches
  Offsets seqused_q, seqused_k;      // (B): the number of rows in use of each sequence; null: all
  int64_t total_q = 0, total_k = 0;  // T_q, T_k: rows of q and of k
  bool lower_right = false;          // the diagonal of each sequence ends at its last query and key
  bool mask_by_row = false;          // the mask's rows are the T_q rows of q
  int64_t first_q = 0, first_k = 0;  // in the call of one sequence: the sequence's first rows

  CacheParams cache;  // only without cu_seqlens_k

  FA_HOST_DEVICE explicit operator bool() const { return bool(cu_seqlens_q); }
};

struct UserFunctions;

struct AttentionParams {
  DType dtype = DType::kFloat32;
  Sizes sizes;
  Tensor4 q;    // (B, H, S_q, D)
  Tensor4 k;    // (B, H_kv, S_k, D)
  Tensor4 v;    // (B, H_kv, S_k, D_v)
  Tensor4 out;  // (B, H, S_q, D_v)  written by the forward, read by the backward
  void* lse =
      nullptr;  // (B, H, S_q) acc, contiguous; natural log; -inf on a fully masked row; packed: (H, T_q)
  double scale = 1.0;    // score = scale * <q_i, k_j>
  double softcap = 0.0;  // > 0: score = softcap * tanh(score / softcap), before ALiBi and mask
  Band band;
  MaskParams mask;
  AlibiParams alibi;
  SinkParams sink;
  DropoutParams dropout;
  DecodeParams decode;  // read by the forward only
  VarlenParams varlen;
  const UserFunctions* functions = nullptr;  // core/program.h; null: none

  // lse[lse_index(b, h, i)] is the lse of row i of head h. The kernels' arrays with one element a row have the same
  // index and the same size, lse_size().
  FA_HOST_DEVICE int64_t lse_index(int64_t b, int64_t h, int64_t i) const {
    return varlen ? h * varlen.total_q + varlen.first_q + i : (b * sizes.heads + h) * sizes.seqlen_q + i;
  }
  FA_HOST_DEVICE int64_t lse_size() const {
    return sizes.heads * (varlen ? varlen.total_q : sizes.batch * sizes.seqlen_q);
  }
};

// Gradient of attn_mask, contiguous, with the mask's dtype and shape. A broadcast dimension has size 1.
struct MaskGrad {
  void* data = nullptr;
  int64_t batch = 1, heads = 1, rows = 1, cols = 1;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

struct BackwardParams : AttentionParams {
  Tensor4 dout;  // (B, H, S_q, D_v)
  // (B, S_q, S_k), stride_h 0: the gradient of the average of P over the heads, which WeightsParams computes. Kernels use
  // dP = dweights / H in place of dP = dO V^T. The CPU kernels and the CUDA tier simt read it.
  Tensor4 dweights;
  const void* dlse = nullptr;     // shape of lse; null: zero
  Tensor4 dq, dk, dv;             // shapes of q, k, v; null data: not wanted
  MaskGrad dmask;                 // null data: not wanted
  void* dalibi_slopes = nullptr;  // (B, H) acc, contiguous; null: not wanted
  void* dsink = nullptr;          // (B, H) acc, contiguous; null: not wanted
  bool deterministic = true;  // true: the same bits in every run. false: a kernel may add to dq in any order

  bool wants_qkv_pass() const { return dq || dk || dv || dalibi_slopes; }
};

// The attention weights: the average of P over the heads. There are no v and out, and D_v is 0. Their backward is
// BackwardParams with dweights.
struct WeightsParams : BackwardParams {
  Tensor4 weights;  // (B, S_q, S_k) at stride_h 0
};

// Tangents of the inputs (docs/derivative_formulas.md), for forward mode and for the double backward. Null data: zero.
struct Tangents {
  Tensor4 q, k, v;    // shapes of q, k, v; in double backward never null
  MaskParams mask;    // of a float mask, broadcast by zero strides like it
  AlibiParams alibi;  // slopes in acc type, (H) or (B, H) by strides
  SinkParams sink;
};

// Forward mode: out, lse and their tangents.
struct JvpParams : AttentionParams {
  Tangents tangents;
  Tensor4 t_out;          // (B, H, S_q, D_v)
  void* t_lse = nullptr;  // (B, H, S_q) acc, contiguous
};

// Double backward: dq, dk, dv, dmask, dalibi_slopes and dsink are the gradients of the number <t_out, dout> +
// <t_lse, dlse>. This number equals <dq, tangents.q> + <dk, tangents.k> + ... with the gradients of the first backward.
struct DoubleBackwardParams : BackwardParams {
  Tangents tangents;
  Tensor4 t_out;                // (B, H, S_q, D_v), of these tangents
  const void* t_lse = nullptr;  // (B, H, S_q) acc, contiguous
};

}  // namespace flash_attn_ext
