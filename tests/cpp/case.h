// One case: shape, options and memory layout of the tensors. Each case runs with several dtypes, instruction sets and
// numbers of threads.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "numbers.h"

namespace test {

using flash_attn_ext::Sizes;

using Shape = std::array<int64_t, 4>;

inline int64_t count(const Shape& s) { return s[0] * s[1] * s[2] * s[3]; }
inline int64_t at(const Shape& s, int64_t a, int64_t b, int64_t c, int64_t d) {
  return ((a * s[1] + b) * s[2] + c) * s[3] + d;
}

struct Layout {
  int64_t shift = 0;             // elements between the start of the allocation and the tensor
  int64_t gap = 0;               // unused elements after each row
  bool heads_innermost = false;  // memory order (B, S, H, D)
  bool transposed = false;       // memory order (B, H, D, S): masks only
};

enum class MaskFill {
  kNothingMasked,  // finite values
  kScattered,      // some elements masked
  kBlocks,         // also whole tiles, rows, columns and the first head masked
};

struct Mask {
  DType dtype = DType::kBool;
  bool per_batch = true, per_head = true, per_row = true, per_col = true;  // false: broadcast
  MaskFill fill = MaskFill::kScattered;
  Layout layout;
};

enum class Slopes { kNone, kPerHead, kPerBatchAndHead };

// The inputs that are NaN.
enum class Poison {
  kNowhere,
  kHidden,  // keys hidden from all queries, and queries that see no key: must not reach a result
  kSeen,    // also the last key of two heads: must reach exactly the queries that see it
};

struct Wanted {
  bool dq = true, dk = true, dv = true, dmask = true, dslopes = true, dsink = true;
};

// Packed sequences: numbers of queries and keys of each. Sizes holds the number of sequences and the longest lengths.
// Inputs and expected results are padded; only the tensors of the kernels are packed.
struct Packing {
  using Lengths = std::vector<std::array<int64_t, 2>>;
  Lengths rows;  // in the tensors
  Lengths used;  // rows in use; empty: all rows
  bool int64_offsets = false;
  bool mask_by_row = false;      // the mask is packed along its rows, like q
  std::vector<int64_t> hostile;  // wrong offsets to pass; results are not compared
  // Keys in caches of S_k rows, forward only. 0: one cache per sequence. n > 0: pages of n rows. -1: packed keys.
  int64_t page_size = -1;
  std::vector<int64_t> hostile_pages;  // wrong page numbers to pass; results are not compared

  bool is_cache() const { return page_size >= 0; }
};
constexpr int kQueries = 0, kKeys = 1;  // indices of Lengths

struct Case {
  std::string name;
  Sizes sizes;
  std::optional<Packing> packing;
  double scale = 0;  // 0: 1 / sqrt(D)
  bool causal = false, lower_right = false;
  int64_t left = -1, right = -1;  // window; -1: unbounded
  double softcap = 0;
  std::optional<Mask> mask;
  Slopes slopes = Slopes::kNone;
  Slopes sink = Slopes::kNone;  // kNone, (H) or (B, H)
  double dropout_p = 0;
  flash_attn_ext::DecodeParams decode;
  bool dlse = true;
  bool expanded_dout = false;  // all rows share one row of memory, with stride 0
  Poison poison = Poison::kNowhere;
  Layout layout;
  Wanted wanted;

  // length: rows in use of sequence b. first_row: its first row in a packed tensor; b == batch gives the end.
  int64_t length(int64_t b, int side) const {
    if (!packing) return side == kQueries ? sizes.seqlen_q : sizes.seqlen_k;
    return (packing->used.empty() ? packing->rows : packing->used)[b][side];
  }
  int64_t first_row(int64_t b, int side) const {
    int64_t row = 0;
    for (int64_t n = 0; n < b; ++n) row += packing->rows[n][side];
    return row;
  }
  bool results_matter() const {
    return !packing || (packing->hostile.empty() && packing->hostile_pages.empty());
  }
  bool is_cache() const { return packing && packing->is_cache(); }
  int64_t pages() const {  // per sequence
    return is_cache() && packing->page_size > 0
               ? (sizes.seqlen_k + packing->page_size - 1) / packing->page_size
               : 1;
  }
  int64_t page_rows() const { return packing->page_size > 0 ? packing->page_size : sizes.seqlen_k; }
  int64_t page_of(int64_t b, int64_t n) const { return sizes.batch * pages() - 1 - (b * pages() + n); }

  Shape q_shape() const { return {sizes.batch, sizes.heads, sizes.seqlen_q, sizes.head_dim}; }
  Shape k_shape() const { return {sizes.batch, sizes.heads_kv, sizes.seqlen_k, sizes.head_dim}; }
  Shape v_shape() const { return {sizes.batch, sizes.heads_kv, sizes.seqlen_k, sizes.head_dim_v}; }
  Shape out_shape() const { return {sizes.batch, sizes.heads, sizes.seqlen_q, sizes.head_dim_v}; }
  Shape lse_shape() const { return {sizes.batch, sizes.heads, sizes.seqlen_q, 1}; }
  Shape slopes_shape() const {
    return {slopes == Slopes::kPerHead ? 1 : sizes.batch, 1, 1, slopes == Slopes::kNone ? 0 : sizes.heads};
  }
  Shape sink_shape() const {
    return {sink == Slopes::kPerHead ? 1 : sizes.batch, 1, 1, sink == Slopes::kNone ? 0 : sizes.heads};
  }
  Shape dslopes_shape() const { return {sizes.batch, sizes.heads, 1, 1}; }
  Shape mask_shape() const {
    if (!mask) return {0, 0, 0, 0};
    return {mask->per_batch ? sizes.batch : 1, mask->per_head ? sizes.heads : 1,
            mask->per_row ? sizes.seqlen_q : 1, mask->per_col ? sizes.seqlen_k : 1};
  }
  bool wants_dmask() const { return mask && mask->dtype != DType::kBool && wanted.dmask; }
  bool wants_dsink() const { return sink != Slopes::kNone && wanted.dsink; }
  bool wants_dslopes() const { return slopes != Slopes::kNone && wanted.dslopes; }
};

std::vector<Case> all_cases();

}  // namespace test
