// Functions of the user in the kernels of this tier: which tiles a block visits, which elements the mask function shows,
// and the new scores.
//
// Only tiles that meet a partial block, or blocks that differ, call the mask function. It runs before the product S = Q K^T,
// when few registers are in use, and its answers are a thread's bits.
#pragma once

#include "../shown_tiles.cuh"
#include "../simt/functions.cuh"
#include "tile.cuh"

namespace flash_attn_ext::cuda::sm80 {

// The tiles of keys in the band that the block mask does not hide from all queries of a block.
template <class C>
class ShownTiles {
 public:
  struct Tile {
    int64_t j0;
    TileState state;
  };

  __device__ ShownTiles(const AttentionParams& p, const simt::DeviceFunctions& functions, int64_t b,
                        int64_t h, int64_t i0, const Range& keys)
      : p_(p), functions_(functions), b_(b), h_(h), i0_(i0), keys_(keys) {}

  __device__ Tile first() { return find(static_cast<int>(keys_.begin / C::kBlockK)); }
  __device__ Tile after(Tile tile) { return find(static_cast<int>(tile.j0 / C::kBlockK) + 1); }

 private:
  const AttentionParams& p_;
  const simt::DeviceFunctions& functions_;
  const int64_t b_, h_, i0_;
  const Range& keys_;
  TileSearch search_;

  __device__ Tile find(int tile) {
    const int end = static_cast<int>(ceil_div(keys_.end, C::kBlockK));
    tile = search_.next(tile, end, [&](int n) {
      const int64_t i_end = smaller<int64_t>(i0_ + C::kBlockQ, p_.sizes.seqlen_q);
      const int64_t j0 = int64_t{n} * C::kBlockK,
                    j_end = smaller<int64_t>(j0 + C::kBlockK, p_.sizes.seqlen_k);
      return states_of_tile(p_, functions_, b_, h_, i0_, i_end, j0, j_end);
    });
    return {int64_t{tile} * C::kBlockK, tile < end ? search_.state(tile) : TileState::kFull};
  }
};

// A position in a tile with the answers of the mask function.
template <class Position>
struct ShownPosition : Position {
  uint32_t bits;  // bit 4 n + e: element e of accumulator n is shown

  __device__ bool inside(int n, int e) const { return (bits >> (4 * n + e) & 1) && Position::inside(n, e); }
};

struct WithFunctions {
  static constexpr bool kAlsoDense = true;

  const simt::DeviceFunctions* device;

  template <class C>
  __device__ ShownTiles<C> tiles(const AttentionParams& p, int64_t b, int64_t h, int64_t i0,
                                 const Range& keys) const {
    return {p, *device, b, h, i0, keys};
  }

  // Asks the mask function about a thread's elements, in accumulators 0 to N - 1. Elements that are hidden anyway may have
  // either answer.
  template <int N, class Tile, class Position>
  __device__ ShownPosition<Position> shown(const AttentionParams& p, const Tile& tile,
                                           const Position& at) const {
    if (tile.state == TileState::kFull) return {at, ~uint32_t{0}};
    uint32_t bits = 0;
#pragma unroll 1
    for (int bit = 0; bit < 4 * N; ++bit) {
      const int n = bit / 4, e = bit % 4;
      const ElementIndex at_element = at.element(n, e);
      if (!at.inside(n, e) || !in_band(p.band.without_chunks(), at_element.i, at_element.j)) continue;
      const simt::ProgramPoint<float> point = point_of(p, at_element, 0, 0);
      const bool is_shown = tile.state == TileState::kPartial
                                ? simt::run_program(device, device->mask, point) != 0
                                : simt::is_shown(*device, point);
      bits |= uint32_t{is_shown} << bit;
    }
    return {at, bits};
  }

  // Whether a tile may have hidden elements. A new score of -inf is hidden, too.
  template <class Tile>
  __device__ bool may_hide(const Tile& tile) const {
    return tile.state != TileState::kFull || changes_scores();
  }
  __device__ bool changes_scores() const { return bool(device->score); }

  // Computes the new scores of elements that attend. Bit 4 n + e of `attends`: that element attends.
  template <int N, class Position>
  __device__ void change_scores(const AttentionParams& p, const Position& at, float (&scores)[N][4],
                                uint32_t& attends) const {
    if (!changes_scores()) return;
    for_each_accumulator(scores, [&](int n, float (&values)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!(attends >> (4 * n + e) & 1)) continue;
        values[e] = simt::number_of<float>(
            simt::run_program(device, device->score, point_of(p, at.element(n, e), values[e], 0)));
        if (values[e] == -kInf<float>) attends &= ~(uint32_t{1} << (4 * n + e));
      }
    });
  }

 private:
  // The arguments of a function at an element.
  static __device__ simt::ProgramPoint<float> point_of(const AttentionParams& p, const ElementIndex& at,
                                                       float score, float gradient) {
    return {at.b, at.h, first_query_index(p) + at.i, at.j, score, gradient};
  }
};

}  // namespace flash_attn_ext::cuda::sm80
