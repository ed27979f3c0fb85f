// What a kernel is told: raw pointers, sizes and strides. Torch-free, shared by every device.
//
// Letters in the comments: B batch, H query heads, H_kv key/value heads (H % H_kv == 0, query head h reads
// key/value head h / (H / H_kv)), S_q and S_k sequence lengths, D head dimension of q and k, D_v of v and
// out. Strides are in elements, never bytes. A new feature is a new small struct here, filled by
// ops/pack_params.cpp.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace flash_attn_ext {

enum class DType : int8_t { kFloat32, kFloat64, kBFloat16, kFloat16, kBool };

// Softmax statistics and every accumulator are fp32, and fp64 for fp64 inputs. "acc" below means that type.

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

// A (B, heads, S, D) tensor whose last dimension is contiguous; the other strides are free.
struct Tensor4 {
  void* data = nullptr;
  int64_t stride_b = 0, stride_h = 0, stride_s = 0;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  template <class T>
  FA_HOST_DEVICE T* row(int64_t b, int64_t h, int64_t s) const {
    return static_cast<T*>(data) + b * stride_b + h * stride_h + s * stride_s;
  }
};

// Which (i, j) of the score matrix the diagonal options leave: causal, its alignment, the sliding window.
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
  FA_HOST_DEVICE bool same(int64_t a, int64_t b) const { return size == 0 || begin(a) == begin(b); }
};

struct Band : DiagonalBand {
  Chunks chunks;

  // For kernels whose why_not refuses chunks: the overloads of mask.h without chunks.
  FA_HOST_DEVICE const DiagonalBand& without_chunks() const { return *this; }
};

// attn_mask, broadcast by zero strides: never expanded. kBool: true attends. Float: added; -inf masks.
//
// A second mask, key_mask, has one element for each key of a batch. What each of the two masks is masked; the rest is
// added. Where it is given alone, it is the mask itself, broadcast.
struct MaskParams {
  const void* data = nullptr;  // null: no mask
  DType dtype = DType::kBool;
  int64_t stride_b = 0, stride_h = 0, stride_q = 0, stride_k = 0;
  const void* key_data = nullptr;  // null: one mask, or none
  DType key_dtype = DType::kBool;
  int64_t key_stride_b = 0, key_stride_k = 0;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  // Whether what is not masked keeps its score.
  FA_HOST_DEVICE bool only_masks() const {
    return dtype == DType::kBool && (!key_data || key_dtype == DType::kBool);
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

// Dropout of P, replayed by the backward: element (b, h, i, j) is kept where its Philox word (core/philox.h)
// is at least `threshold`. The state stays a pointer so that a captured CUDA graph reads fresh values at each
// replay.
//
// A part of a larger call drops what the larger one drops if it has a place in it: {row, column, head, heads}, where its
// first element lies and how many heads a batch of the larger call has.
struct DropoutParams {
  const int64_t* rng_state = nullptr;  // {seed, offset}, on the kernel's device; null: no dropout
  const int64_t* place = nullptr;      // likewise; null: the call is the larger one
  uint64_t threshold = 0;              // round(p * 2^32)
  double keep_scale = 1.0;             // 1 / (1 - p); 0 if p == 1

  FA_HOST_DEVICE explicit operator bool() const { return rng_state != nullptr; }
  FA_HOST_DEVICE int64_t row(int64_t i) const { return place ? place[0] + i : i; }
  FA_HOST_DEVICE int64_t col(int64_t j) const { return place ? place[1] + j : j; }
  FA_HOST_DEVICE int64_t head(int64_t b, int64_t h, int64_t heads) const {
    return place ? b * place[3] + place[2] + h : b * heads + h;
  }
};

// How the forward cuts the keys where there are few queries (Flash-Decoding). Either option, if given, asks
// for that kernel whatever the number of queries.
struct DecodeParams {
  int64_t num_splits = 0;        // pieces of the keys, at most; 0: as many as the shape needs
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

// Keys and values in pages, as many caches of generation are: row j of a sequence is row j % page_size of its
// page number j / page_size. stride_b of k and v is that from page to page.
struct PageTable {
  Offsets pages;          // (B, count), contiguous; null: each sequence's rows lie behind each other
  int64_t count = 0;      // pages of a sequence
  int64_t page_size = 0;  // rows
  int64_t num_pages = 0;  // that there are: numbers outside are taken for the nearest
  int64_t sequence = 0;   // of one sequence's call: its row of the table

  FA_HOST_DEVICE explicit operator bool() const { return bool(pages); }
  FA_HOST_DEVICE int64_t page_of(int64_t row) const {
    const int64_t page = pages[sequence * count + row / page_size];
    return page < 0 ? 0 : page < num_pages ? page : num_pages - 1;
  }
};

enum class CacheDType : int8_t { kOfQuery, kInt8, kFloat8E4M3, kFloat8E5M2 };

// What 8-bit keys or values are multiplied with, float32, broadcast by zero strides. b counts caches or pages,
// s their rows.
struct CacheScale {
  const float* data = nullptr;  // null: 1
  int64_t stride_b = 0, stride_h = 0, stride_s = 0;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  FA_HOST_DEVICE float at(int64_t b, int64_t h, int64_t s) const {
    return data[b * stride_b + h * stride_h + s * stride_s];
  }
};

// Keys and values in caches of S_k rows, of which each sequence fills the first seqused_k[b].
struct CacheParams {
  Offsets batch_idx;  // (B): which cache is whose; null: its own number
  Offsets leftpad;    // (B): rows left out at the start; null: none
  int64_t caches = 0;
  CacheDType dtype = CacheDType::kOfQuery;  // of k and v
  CacheScale k_scale, v_scale;
  PageTable pages;
  int64_t cache = 0;  // of one sequence's call: its cache
  // The mask is a tree's: its columns are the last S_q keys, those of the queries themselves. It hides no key before.
  bool tree_mask = false;
  int64_t first_masked = 0;  // of one sequence's call: the key of column 0, S_k - S_q
};

// Packed sequences of different lengths: rows [cu_seqlens_q[b], cu_seqlens_q[b + 1]) of q, out and their
// gradients are those of sequence b, whose stride_b is 0; so are those of k and v by cu_seqlens_k. B counts
// sequences, S_q and S_k are the longest lengths, and lse is (H, T_q). Masks, slopes and dropout count rows,
// columns and batches as a padded call would: from each sequence's start, and by sequences.
//
// core/sequence.h makes the call of one sequence of it. Read by the CPU kernels and by every CUDA tier;
// sm90 refuses caches by name.
struct VarlenParams {
  Offsets cu_seqlens_q;              // (B + 1), ascending from 0 to T_q; null: no packing
  Offsets cu_seqlens_k;              // (B + 1), likewise; null: k and v are caches
  Offsets seqused_q, seqused_k;      // (B): only so many rows of each sequence exist; null: all
  int64_t total_q = 0, total_k = 0;  // T_q, T_k: rows of q and of k
  bool lower_right = false;          // each sequence's diagonal ends in its last row and column
  bool mask_by_row = false;          // the mask's rows are the T_q rows of q
  int64_t first_q = 0, first_k = 0;  // of one sequence's call: its first rows

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

  // The index of row i of head h in lse, and in the kernels' arrays with one element a row; and how many rows
  // that is.
  FA_HOST_DEVICE int64_t lse_index(int64_t b, int64_t h, int64_t i) const {
    return varlen ? h * varlen.total_q + varlen.first_q + i : (b * sizes.heads + h) * sizes.seqlen_q + i;
  }
  FA_HOST_DEVICE int64_t lse_size() const {
    return sizes.heads * (varlen ? varlen.total_q : sizes.batch * sizes.seqlen_q);
  }
};

// Gradient of attn_mask in the mask's own shape: contiguous, dtype of the mask, each size 1 or the full one.
struct MaskGrad {
  void* data = nullptr;
  int64_t batch = 1, heads = 1, rows = 1, cols = 1;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

struct BackwardParams : AttentionParams {
  Tensor4 dout;  // (B, H, S_q, D_v)
  // (B, S_q, S_k) at stride_h 0: of the average of P over the heads, in a call whose result that is (WeightsParams).
  // It takes the place of dout: dP = dweights / H, not dO V^T. Read by the CPU kernels and the CUDA tier simt.
  Tensor4 dweights;
  const void* dlse = nullptr;     // in the form of lse; null: zero
  Tensor4 dq, dk, dv;             // shapes of q, k, v; null data: not wanted
  MaskGrad dmask;                 // null data: not wanted
  void* dalibi_slopes = nullptr;  // (B, H) acc, contiguous; null: not wanted
  void* dsink = nullptr;          // likewise
  bool deterministic = true;      // the same bits at every run; false lets a kernel add dq in any order

  bool wants_qkv_pass() const { return dq || dk || dv || dalibi_slopes; }
};

// The weights themselves: the average of P over the heads. There are no v and out, and D_v is 0. Their backward is
// BackwardParams with dweights.
struct WeightsParams : BackwardParams {
  Tensor4 weights;  // (B, S_q, S_k) at stride_h 0
};

// A direction in which the inputs move (docs/derivative_formulas.md): the tangents of forward mode, and what a second
// derivative is contracted with. Null data: zero.
struct Tangents {
  Tensor4 q, k, v;    // shapes of q, k, v; in double backward never null
  MaskParams mask;    // of a float mask, broadcast by zero strides like it
  AlibiParams alibi;  // slopes in acc type, (H) or (B, H) by strides
  SinkParams sink;
};

// Forward mode: out and lse, and how they move with the inputs.
struct JvpParams : AttentionParams {
  Tangents tangents;
  Tensor4 t_out;          // (B, H, S_q, D_v)
  void* t_lse = nullptr;  // (B, H, S_q) acc, contiguous
};

// The gradient with respect to q, k, v, mask, slopes and sink of <t_out, dout> + <t_lse, dlse>, which is also that of
// <dq, tangents.q> + <dk, tangents.k> + ...: dq, dk, dv, dmask, dalibi_slopes and dsink here are its parts.
struct DoubleBackwardParams : BackwardParams {
  Tangents tangents;
  Tensor4 t_out;                // (B, H, S_q, D_v), of these tangents
  const void* t_lse = nullptr;  // (B, H, S_q) acc, contiguous
};

}  // namespace flash_attn_ext
