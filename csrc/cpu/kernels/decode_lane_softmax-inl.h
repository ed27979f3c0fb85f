// The softmax of S^T of a tile (decode_tile-inl.h): rows are lanes, and only the band hides keys.
#pragma once

#include "decode_form-inl.h"
#include "softmax-inl.h"

template <class In, class T>
struct DecodeTile;

template <class In, class T>
struct LaneSoftmax {
  const DecodeTile<In, T>& t;

  // The type that sets the error of P. float16 counts as float32: calls that widen float16 before have the same bits.
  using ProbType = std::conditional_t<std::is_same_v<In, BFloat16>, In, T>;
  using Operands = ManyRowsOperands<In, T>;

  // Replaces S^T of head `n` by P^T, and adds to m and l. For blocks of lanes it also multiplies O by the factors; otherwise the
  // product P V does.
  void replace_scores(int64_t n, const SplitResult<T>& r) const {
    const LaneTile<T> scores{t.scores_of(n), t.padded_keys};
    if (t.may_mask()) hide_keys(n, scores);
    if (!t.form.has_blocks)
      return decode_softmax_lanes<ProbType, T>(
          scores.data, t.keys, t.lanes, t.unified, r.row_max, r.row_sum, t.rows, t.rescale_of(n),
          [&](int64_t row) { return ProbsInPlace<T>{scores.data + row, t.lanes, t.keys}; });
    t.for_each_lane_tile(scores, [&](int64_t first, int64_t count, T* block) {
      replace_block(n, block, lanes_of<T>(count), count, r.skip(first, t.d_v));
    });
  }

 private:
  // S^T = -inf where the band hides the key from the row's query.
  void hide_keys(int64_t n, const LaneTile<T>& scores) const {
    t.for_each_lane_tile(scores, [&](int64_t first, int64_t count, T* block) {
      const int64_t lanes = lanes_of<T>(count);
      for (int64_t r = 0; r < count; ++r) {
        const Range seen = band_lanes(t.p.band, t.frame_of_row(n, first + r), 0);
        for (int64_t j = 0; j < seen.begin; ++j) block[j * lanes + r] = kNegInf<T>;
        for (int64_t j = std::max<int64_t>(seen.end, 0); j < t.keys; ++j) block[j * lanes + r] = kNegInf<T>;
      }
    });
  }
  void replace_block(int64_t n, T* scores, int64_t lanes, int64_t count, const SplitResult<T>& r) const {
    const int64_t vectors = t.padded_keys * lanes / kLanes<T>;
    if constexpr (Operands::kPairsProbs)
      if (t.pairs_probs(n)) {
        using Pairs = typename Operands::Element;
        Pairs* pairs = reinterpret_cast<Pairs*>(scores);
        replace_block(n, scores, lanes, count, r,
                      typename Operands::RoundedProbs(pairs, lanes, t.value_factor(n)));
        if (lanes == kLanes<T>)
          std::fill(pairs + ceil_div(t.keys, 2) * lanes, pairs + t.padded_keys / 2 * lanes, Pairs{});
        return;
      }
    replace_block(n, scores, lanes, count, r, ProbsInPlace<T>{scores, kLanes<T>, vectors});
    if (lanes == kLanes<T>)  // pads pairs with zeros
      std::fill(scores + t.keys * lanes, scores + t.padded_keys * lanes, T(0));
  }
  template <class Write>
  void replace_block(int64_t n, T* scores, int64_t lanes, int64_t count, const SplitResult<T>& r,
                     const Write& write) const {
    if (lanes < kLanes<T>)
      return decode_softmax_part_of_vector<ProbType, T>(scores, t.keys, t.padded_keys, lanes, t.unified,
                                                        r.row_max, r.row_sum, count, r.out, t.d_v, write);
    T* rescale = t.rescale_of(n);
    decode_softmax_lanes<ProbType, T>(scores, t.keys, lanes, t.unified, r.row_max, r.row_sum, count, rescale,
                                      [&](int64_t) { return write; });
    for (int64_t row = 0; row < count; ++row)
      if (rescale[row] != T(1)) multiply_row<T>(r.out + row * t.d_v, rescale[row], t.d_v);
  }
};
