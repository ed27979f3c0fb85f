// Functions of the user in the kernels of this tier. They give the tiles that a block visits, the elements that the
// mask function shows, and the new scores.
//
// The mask function runs only on tiles that overlap a partial block or different blocks. It runs before the product S =
// Q K^T, when few registers are in use. A thread stores the results as bits.
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
    int j0;
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
      return states_of_tile(p_, functions_, b_, h_, i0_, i_end, j0, j_end, functions_.blocks.queries_before);
    });
    return {tile * C::kBlockK, tile < end ? search_.state(tile) : TileState::kFull};
  }
};

// A position in a tile with the answers of the mask function.
template <class Position>
struct ShownPosition : Position {
  uint32_t bits;  // bit 4 n + e: element e of accumulator n is shown

  __device__ bool shows(int n, int e) const { return bits >> (4 * n + e) & 1; }
  __device__ bool inside(int n, int e) const { return shows(n, e) && Position::inside(n, e); }
  __device__ bool inside(const Sizes& z, int n, int e) const {
    return shows(n, e) && Position::inside(z, n, e);
  }
};

// The steps of a block of keys in the backward, for each head of the group. A step is a tile of queries. Tiles that the
// block mask hides from all of these keys are skipped.
template <class C>
class ShownSteps {
 public:
  struct Step {
    int head, tile;  // head of the group; tile of the head
    TileState state;
  };

  __device__ ShownSteps(const AttentionParams& p, const simt::DeviceFunctions& functions, int64_t b,
                        int64_t first_head, int group, int64_t j0, int first_tile, int end_tile)
      : p_(p),
        functions_(functions),
        b_(b),
        first_head_(first_head),
        j0_(j0),
        group_(group),
        first_tile_(first_tile),
        end_tile_(end_tile) {}

  __device__ Step first() { return find(0, first_tile_); }
  __device__ Step after(const Step& step) { return find(step.head, step.tile + 1); }

 private:
  const AttentionParams& p_;
  const simt::DeviceFunctions& functions_;
  const int64_t b_, first_head_, j0_;
  const int group_, first_tile_, end_tile_;
  TileSearch search_;  // searches in one head

  __device__ Step find(int head, int tile) {
    for (; head < group_; ++head, tile = first_tile_, search_ = TileSearch()) {
      const int found = search_.next(tile, end_tile_, [&](int n) {
        const int64_t i0 = int64_t{n} * C::kBlockQ,
                      i_end = smaller<int64_t>(i0 + C::kBlockQ, p_.sizes.seqlen_q);
        const int64_t j_end = smaller<int64_t>(j0_ + C::kBlockK, p_.sizes.seqlen_k);
        return states_of_tile(p_, functions_, b_, first_head_ + head, i0, i_end, j0_, j_end);
      });
      if (found < end_tile_) return {head, found, search_.state(found)};
    }
    return {group_, first_tile_, TileState::kFull};
  }
};

// Whether a call has a function on scores. A kernel for one of the first two answers has fewer instructions.
enum class ScoreFunction { kNone, kOne, kAsDevice };

template <ScoreFunction kScore>
struct FunctionsWith {
  static constexpr bool kAlsoDense = true;

  const simt::DeviceFunctions* device;

  template <class C>
  __device__ ShownTiles<C> tiles(const AttentionParams& p, int64_t b, int64_t h, int64_t i0,
                                 const Range& keys) const {
    return {p, *device, b, h, i0, keys};
  }

  // Evaluates the mask function on a thread's elements, in accumulators 0 to N - 1. The result for other hidden
  // elements is arbitrary.
  template <int N, class Tile, class Position>
  __device__ ShownPosition<Position> shown(const AttentionParams& p, const Tile& tile,
                                           const Position& at) const {
    if (tile.state == TileState::kFull) return {at, ~uint32_t{0}};
    uint32_t bits = 0;
#pragma unroll 1
    for (int bit = 0; bit < 4 * N; ++bit) {
      const int n = bit / 4, e = bit % 4;
      const ElementIndex at_element = at.element(n, e);
      const bool inside = at_element.i < p.sizes.seqlen_q && at_element.j < p.sizes.seqlen_k;
      if (!inside || !in_band(p.band.without_chunks(), at_element.i, at_element.j)) continue;
      const simt::ProgramPoint<float> point = point_of(p, at_element, 0);
      const bool is_shown = tile.state == TileState::kPartial
                                ? simt::run_program(device, device->mask, point) != 0
                                : simt::is_shown(*device, point, device->blocks.queries_before);
      bits |= uint32_t{is_shown} << bit;
    }
    return {at, bits};
  }

  // Whether a tile may have hidden elements. A new score of -inf is hidden, too.
  template <class Tile>
  __device__ bool may_hide(const Tile& tile) const {
    return tile.state != TileState::kFull || changes_scores();
  }
  __device__ bool changes_scores() const {
    return kScore == ScoreFunction::kAsDevice ? bool(device->score) : kScore == ScoreFunction::kOne;
  }

  // Computes the new scores of elements that attend. Bit 4 n + e of `attends`: that element attends.
  template <int N, class Position>
  __device__ void change_scores(const AttentionParams& p, const Position& at, float (&scores)[N][4],
                                uint32_t& attends) const {
    if (!changes_scores()) return;
    for_each_accumulator(scores, [&](int n, float (&values)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!(attends >> (4 * n + e) & 1)) continue;
        values[e] = run_score(p, at.element(n, e), values[e]);
        if (values[e] == -kInf<float>) attends &= ~(uint32_t{1} << (4 * n + e));
      }
    });
  }

  // The backward.
  template <class C>
  __device__ ShownSteps<C> steps(const AttentionParams& p, int64_t b, int64_t first_head, int group,
                                 int64_t j0, int first_tile, int end_tile) const {
    return {p, *device, b, first_head, group, j0, first_tile, end_tile};
  }
  // The blocks of keys in (block, last] that visit the query tile of a position. Each lane checks another block.
  template <class C, class Position>
  __device__ int blocks_between(const AttentionParams& p, const Position& at, int64_t i_end, int block,
                                int64_t last) const {
    int visits = 0;
    for (int64_t first = block + 1; first <= last; first += 32) {
      const int64_t j0 = (first + lane()) * C::kBlockK,
                    j_end = smaller<int64_t>(j0 + C::kBlockK, p.sizes.seqlen_k);
      const bool visited = first + lane() <= last &&
                           !states_of_tile(p, *device, at.b, at.h, at.i0, i_end, j0, j_end).is_hidden();
      visits += __popc(__ballot_sync(0xffffffffu, visited));
    }
    return visits;
  }
  // The scores before the user's function: arguments of its derivative.
  template <int N>
  struct OldScores {
    float values[kScore == ScoreFunction::kNone ? 1 : N][4];
  };
  // Keeps the scores, and replaces them by the new scores. Then the gates of the softcap are 1, because
  // change_gradients() computes them from the old scores: registers do not suffice for both.
  template <class Position, int N>
  __device__ void recompute_new_scores(const AttentionParams& p, const Position& at, float (&scores)[N][4],
                                       float (&gates)[N][4], uint32_t& attends, OldScores<N>& old) const {
    if constexpr (kScore != ScoreFunction::kNone) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          old.values[n][e] = scores[n][e];
          gates[n][e] = 1;
        }
      change_scores(p, at, scores, attends);
    }
  }
  // Replaces gradients of the new scores by gradients of the products, without the factor `scale`. Adds to the
  // gradients of captured elements.
  template <class Position, int N>
  __device__ void change_gradients(const AttentionParams& p, const Position& at, OldScores<N>& old,
                                   float (&dscores)[N][4]) const {
    if constexpr (kScore == ScoreFunction::kNone)
      return;
    else
      for_each_accumulator(dscores, old.values, [&](int n, float (&gradients)[4], float (&scores)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const ElementIndex at_element = at.element(n, e);
          gradients[e] = simt::old_gradient<true>(device, point_of(p, at_element, scores[e], gradients[e])) *
                         gate(p, at_element, scores[e]);
        }
      });
  }
  // Whether the functions hide an element. `score`: the score before the user's function.
  __device__ bool hides(const AttentionParams& p, const ElementIndex& at, float score) const {
    return !simt::is_shown(*device, point_of(p, at, 0), device->blocks.queries_before) ||
           new_score(p, at, score) == -kInf<float>;
  }
  __device__ float new_score(const AttentionParams& p, const ElementIndex& at, float score) const {
    return changes_scores() ? run_score(p, at, score) : score;
  }
  // The gradient of the score before the user's function.
  __device__ float old_gradient(const AttentionParams& p, const ElementIndex& at, float score,
                                float gradient) const {
    return changes_scores() ? simt::old_gradient<false>(device, point_of(p, at, score, gradient)) : gradient;
  }

 private:
  __device__ float run_score(const AttentionParams& p, const ElementIndex& at, float score) const {
    return simt::number_of<float>(simt::run_program(device, device->score, point_of(p, at, score)));
  }
  // The arguments of a function at an element.
  static __device__ simt::ProgramPoint<float> point_of(const AttentionParams& p, const ElementIndex& at,
                                                       float score, float gradient = 0) {
    return {at.b, at.h, first_query_index(p) + at.i, at.j, score, gradient};
  }
  // The derivative of the softcap at a score: 1 - tanh^2. It is 0 for a score of -inf.
  static __device__ float gate(const AttentionParams& p, const ElementIndex& at, float score) {
    if (!has_softcap(p)) return 1;
    if (p.alibi)
      score +=
          rounded_product(alibi_slope<float>(p.alibi, at.b, at.h), alibi_distance<float>(p.band, at.i, at.j));
    const float tanh = larger(score / static_cast<float>(p.softcap), -1.0f);
    return 1 - tanh * tanh;
  }
};

using WithFunctions = FunctionsWith<ScoreFunction::kAsDevice>;

}  // namespace flash_attn_ext::cuda::sm80
