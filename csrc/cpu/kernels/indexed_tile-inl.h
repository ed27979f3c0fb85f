// Attention by index: the call of one query row and one key head. Its queries are the query heads that share the key
// head, its keys are the keys that the row lists. A tile of keys is gathered once for all of these heads. The products
// are the products of the forward: S^T = K Q^T and O += P V. In is the type of their operands: rows of 16 bits are widened
// when a tile gathers them, unless the products multiply bfloat16. So float32 and 16 bits share one text.
//
//             rows of Q x keys of a tile
//   tile      48 x 64            the forward's tile; more heads make several blocks of 48
#pragma once

#include "dropout_tile-inl.h"
#include "head_scores-inl.h"

constexpr int64_t kGatheredKeys = 64;

// The sizes of the call on one tile.
inline Sizes sizes_of_gathered(const Sizes& z) {
  return {1, 1, 1, z.heads / z.heads_kv, kGatheredKeys, z.head_dim, z.head_dim_v};
}

// The call on one tile of keys, before the queries and the keys are known. It has no band, ALiBi and masks, because
// KeyTile applies them. Its dropout only declares that P is multiplied before P V.
template <class In>
AttentionParams call_of_row(const AttentionParams& p) {
  AttentionParams row;
  row.dtype = std::is_same_v<In, float> ? DType::kFloat32 : p.dtype;  // of the operands: rows are widened
  row.sizes = sizes_of_gathered(p.sizes);
  row.scale = p.scale;
  row.softcap = p.softcap;
  row.dropout = p.dropout;
  return row;
}

// Returns the rows of query i and of heads [h, h + heads) of q or dout, as operands: the caller's memory, or widened in
// `copy`. `copy` has room for heads * round_up_to_lanes(cols) elements.
template <class In>
Tensor4 rows_of_heads(const Tensor4& t, DType dtype, int64_t b, int64_t h, int64_t i, int64_t heads,
                      int64_t cols, In* copy) {
  return for_row_type<In>(dtype, [&](auto element) -> Tensor4 {
    using Row = decltype(element);
    if constexpr (std::is_same_v<Row, In>) {
      return {t.row<In>(b, h, i), 0, 0, t.stride_h};
    } else {
      return {copy, 0, 0, load_tile<Row, In>(t.row<Row>(b, h, i), t.stride_h, heads, cols, copy).ld};
    }
  });
}

// The blocks of query heads of a key head.
inline int64_t block_of_heads() { return forward_tiling<float>().block_q; }
inline int64_t count_head_blocks(const Sizes& z) { return ceil_div(z.heads / z.heads_kv, block_of_heads()); }

template <class In>
FA_INLINE void copy_row(In* to, const In* from, int64_t cols) {
  constexpr int64_t kStep = FA_VECTOR_BYTES / sizeof(In);
  using Bytes = Vec<float>;
  int64_t c = 0;
  for (; c + kStep <= cols; c += kStep) {
    Bytes x;
    std::memcpy(&x, from + c, sizeof x);
    std::memcpy(to + c, &x, sizeof x);
  }
  if (c < cols) std::memcpy(to + c, from + c, (cols - c) * sizeof(In));
}

// Whether rows of K are FlashMLA's rows, which are widened when a tile gathers them.
inline bool has_latent_rows(const AttentionParams& p) { return p.varlen.cache.dtype == CacheDType::kLatent; }

// Rows of K or V that a later tile gathers, for GradualPrefetch. They are not contiguous, so the hardware does not
// prefetch them.
class RowsAhead {
 public:
  RowsAhead(const Tensor4& t, int64_t b, int64_t h, int64_t row_bytes, int64_t element_bytes,
            const int32_t* keys, int64_t count)
      : base_(static_cast<const char*>(t.data) + (b * t.stride_b + h * t.stride_h) * element_bytes),
        stride_(t.stride_s * element_bytes),
        lines_(ceil_div(row_bytes, kLine)),
        keys_(keys),
        count_(count) {}

  int64_t count() const { return count_ * lines_; }

  void lines(int64_t n) {
    while (n > 0 && row_ < count_) {
      const char* row = base_ + keys_[row_] * stride_;
      for (; n > 0 && line_ < lines_; --n, ++line_)
        __builtin_prefetch(row + line_ * kLine, 0, kPrefetchIntoL2);
      if (line_ == lines_) line_ = 0, ++row_;
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const char* base_;
  int64_t stride_, lines_;
  const int32_t* keys_;
  int64_t count_, row_ = 0, line_ = 0;
};

// The keys of one tile, and their rows of K and V.
template <class In, class T>
struct KeyTile {
  int32_t* keys;   // [kGatheredKeys], ascending
  int32_t* ahead;  // [kGatheredKeys]   the keys of the next tile
  int64_t count = 0, ahead_count = 0;
  In* k_copy;  // [kGatheredKeys][D] only if the keys are not contiguous, or widened
  In* v_copy;  // [kGatheredKeys][D_v]  likewise, and if V is not a part of K
  T* bias;     // [kGatheredKeys][heads of a block]   only with a mask or ALiBi
  T* dropout;  // [kGatheredKeys][heads of a block]   only with dropout
  Tensor4 k, v;

  static KeyTile allocate(Arena& arena, const AttentionParams& p) {
    KeyTile tile;
    tile.keys = arena.take<int32_t>(kGatheredKeys);
    tile.ahead = arena.take<int32_t>(kGatheredKeys);
    tile.k_copy = arena.take<In>(kGatheredKeys * copied_columns(p.sizes.head_dim));
    tile.v_copy = arena.take<In>(kGatheredKeys * copied_columns(p.sizes.head_dim_v));
    tile.bias = p.mask || p.alibi ? arena.take<T>(kGatheredKeys * block_of_heads()) : nullptr;
    tile.dropout = p.dropout ? arena.take<T>(kGatheredKeys * block_of_heads()) : nullptr;
    return tile;
  }

  // Moves to the next keys of the row. Returns whether there are any. `following`: the keys of the next row.
  bool load(const AttentionParams& p, int64_t b, int64_t h_kv, KeyCursor& cursor, KeyCursor following) {
    count = cursor.next(keys, kGatheredKeys);
    if (count == 0) return false;
    k = gather(p, p.k, b, h_kv, p.sizes.head_dim, k_copy);
    v = values_in_keys(p) ? k : gather(p, p.v, b, h_kv, p.sizes.head_dim_v, v_copy);
    KeyCursor next = cursor;
    ahead_count = next.next(ahead, kGatheredKeys);
    if (ahead_count == 0) ahead_count = following.next(ahead, kGatheredKeys);
    return true;
  }

  // Loads the factors of dropout of query i: rows are keys, lanes are the heads from h on.
  void load_dropout(const AttentionParams& p, int64_t b, int64_t h, int64_t i, const TileFrame& f) const {
    load_dropout_of_keys<T>(p, {b, h, i, 0, f.queries, f.keys, f.ld, true}, keys, dropout);
  }

  RowsAhead keys_ahead(const AttentionParams& p, int64_t b, int64_t h_kv) const {
    return rows_ahead(p, p.k, b, h_kv, p.sizes.head_dim, ahead_count);
  }
  RowsAhead values_ahead(const AttentionParams& p, int64_t b, int64_t h_kv) const {
    return rows_ahead(p, p.v, b, h_kv, p.sizes.head_dim_v, values_in_keys(p) ? 0 : ahead_count);
  }

 private:
  // Latent attention: a value is the first columns of its key, and is read once.
  static bool values_in_keys(const AttentionParams& p) {
    return p.v.data == p.k.data && p.v.stride_b == p.k.stride_b && p.v.stride_h == p.k.stride_h &&
           p.v.stride_s == p.k.stride_s && p.sizes.head_dim_v <= p.sizes.head_dim;
  }
  static int64_t copied_columns(int64_t cols) { return ceil_div(cols, FA_VECTOR_BYTES) * FA_VECTOR_BYTES; }

  Tensor4 gather(const AttentionParams& p, const Tensor4& t, int64_t b, int64_t h, int64_t cols,
                 In* copy) const {
    const int64_t ld = copied_columns(cols);
    if (has_latent_rows(p)) {
      for (int64_t r = 0; r < count; ++r) copy_latent(copy + r * ld, t.row<uint8_t>(b, h, keys[r]), cols);
      return {copy, 0, 0, ld};
    }
    const bool contiguous = keys[count - 1] - keys[0] == count - 1;
    return for_row_type<In>(p.dtype, [&](auto element) -> Tensor4 {
      using Row = decltype(element);
      if constexpr (std::is_same_v<Row, In>) {
        if (contiguous) return {t.row<In>(b, h, keys[0]), 0, 0, t.stride_s};
        for (int64_t r = 0; r < count; ++r) copy_row<In>(copy + r * ld, t.row<In>(b, h, keys[r]), cols);
      } else {
        for (int64_t r = 0; r < count; ++r)
          load_tile<Row, In>(t.row<Row>(b, h, keys[r]), 0, 1, cols, copy + r * ld);
      }
      return {copy, 0, 0, ld};
    });
  }
  RowsAhead rows_ahead(const AttentionParams& p, const Tensor4& t, int64_t b, int64_t h, int64_t cols,
                       int64_t rows) const {
    if (has_latent_rows(p)) return {t, b, h, kLatentRowBytes, 1, ahead, rows};
    return {t, b, h, cols * bytes_of(p.dtype), bytes_of(p.dtype), ahead, rows};
  }
};

// Adds a mask's elements to bias[key][head]. An element of -inf hides the key, for every value of the bias.
template <class T, class M, class BiasOf>
void add_gathered_mask(const M* mask, int64_t stride_h, int64_t stride_k, const int32_t* keys,
                       const TileFrame& f, T* bias, bool& hides, const BiasOf& bias_of) {
  for (int64_t r = 0; r < f.keys; ++r) {
    const M* element = mask + keys[r] * stride_k;
    for (int64_t c = 0; c < f.queries; ++c) {
      const T own = bias_of(element[c * stride_h]);
      T& sum = bias[r * f.ld + c];
      hides |= own == kNegInf<T>;
      sum = own == kNegInf<T> || sum == kNegInf<T> ? kNegInf<T> : sum + own;
    }
  }
}

template <class T>
void add_gathered_mask(const void* data, DType dtype, int64_t offset, int64_t stride_h, int64_t stride_k,
                       const int32_t* keys, const TileFrame& f, T* bias, bool& hides) {
  if (dtype == DType::kBool)
    return add_gathered_mask<T>(static_cast<const uint8_t*>(data) + offset, stride_h, stride_k, keys, f, bias,
                                hides, [](uint8_t seen) { return seen ? T(0) : kNegInf<T>; });
  for_float_mask<T>(dtype, [&](auto element) {
    using M = decltype(element);
    add_gathered_mask<T>(static_cast<const M*>(data) + offset, stride_h, stride_k, keys, f, bias, hides,
                         [](M x) { return scalar_as<T>(x); });
  });
}

// Returns the masks and ALiBi of heads [h, h + f.queries) as the bias of a tile.
template <class T>
MaskTile<T> gathered_mask(const AttentionParams& p, int64_t b, int64_t h, int64_t i, const int32_t* keys,
                          const TileFrame& f, T* bias) {
  MaskTile<T> tile;
  if (!bias) return tile;
  std::fill(bias, bias + f.keys * f.ld, T(0));
  for (int64_t r = 0; p.alibi && r < f.keys; ++r) {
    const T distance = std::abs(static_cast<T>(i + p.band.diagonal - keys[r]));
    const T* slopes = static_cast<const T*>(p.alibi.slopes) + b * p.alibi.stride_b + h * p.alibi.stride_h;
    for (int64_t c = 0; c < f.queries; ++c) bias[r * f.ld + c] = -slopes[c * p.alibi.stride_h] * distance;
  }
  const MaskParams& m = p.mask;
  bool hides = false;
  if (m)
    add_gathered_mask<T>(m.data, m.dtype, b * m.stride_b + h * m.stride_h + i * m.stride_q, m.stride_h,
                         m.stride_k, keys, f, bias, hides);
  if (m.key_data)
    add_gathered_mask<T>(m.key_data, m.key_dtype, b * m.key_stride_b, 0, m.key_stride_k, keys, f, bias,
                         hides);
  tile.bias = bias;
  tile.masked = hides ? TileMask::kSome : TileMask::kNone;
  return tile;
}
