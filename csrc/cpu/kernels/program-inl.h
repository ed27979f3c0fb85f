// Interprets a program (core/program.h) on a tile of scores. Each instruction computes 16 rows, so that all values stay in
// L1. A value that is equal for all rows is computed once per tile.
#pragma once

#include "frame-inl.h"
#include "program_math-inl.h"

constexpr int64_t kStripRows = 16;

// The values of a program, by rank.
template <class T>
struct ProgramMemory {
  T* values[4] = {};

  // `lanes`: the longest row of a tile.
  static ProgramMemory allocate(Arena& arena, const UserFunctions& functions, int64_t lanes) {
    constexpr int64_t L = kLanes<T>;
    const int64_t ld = round_up_to_lanes<T>(lanes);
    const int64_t elements[4] = {L, std::max(kStripRows * L, ld), std::max(kStripRows * L, ld),
                                 kStripRows * ld};
    ProgramMemory memory;
    for (int rank = 0; rank < 4; ++rank) {
      int64_t slots = 0;
      for (const Program& program :
           {functions.score, functions.gradient, functions.captured_gradient, functions.mask})
        if (program) slots = std::max(slots, program.slots(rank));
      memory.values[rank] = arena.take<T>(slots * elements[rank]);
    }
    return memory;
  }
};

template <class T>
FA_INLINE VecIndex<T> splat_index(int64_t x) {
  using Element = std::remove_reference_t<decltype(std::declval<VecIndex<T>>()[0])>;
  return VecIndex<T>{} + static_cast<Element>(x);
}

template <class T>
FA_INLINE Vec<T> reversed(Vec<T> x) {
  return pick<T>(x, x, splat_index<T>(kLanes<T> - 1) - iota<T>());
}

// Returns the step if the lanes are n, n + step, n + 2 step, ... with a step of 1, -1 or 0; otherwise kNoStep. Positions,
// differences of positions, and clamped differences, which index most tables, are such lanes.
constexpr int kNoStep = 2;
template <class T>
FA_INLINE int common_step(VecIndex<T> n) {
  const int64_t step = n[1] - n[0];
  if (step < -1 || step > 1) return kNoStep;
  const VecIndex<T> others = n - splat_index<T>(n[0]) - iota<T>() * splat_index<T>(step);
  uint64_t words[sizeof(others) / 8], any = 0;
  std::memcpy(words, &others, sizeof others);
  for (const uint64_t word : words) any |= word;
  return any == 0 ? static_cast<int>(step) : kNoStep;
}

template <class T>
struct ProgramRun {
  using V = Vec<T>;
  using I = VecIndex<T>;
  using U = VecBits<T>;

  Program program;
  const UserFunctions& functions;
  TileFrame f;
  int64_t first_query;   // index of query 0 of the call
  T *scores, *gradient;  // the tiles of slots 0 and 1
  ProgramMemory<T> memory;
  double* sums = nullptr;  // of scatter_add: the gradients of captured elements

  bool varies_by_row(Rank rank) const { return rank & (f.lanes_are_queries ? kKey : kQuery); }
  bool varies_by_lane(Rank rank) const { return rank & (f.lanes_are_queries ? kQuery : kKey); }

  // `r0`: first row of the strip.
  ProgramSource<T> source(Operand o, int64_t r0) const {
    if (!o) return {};
    const Rank rank = o.rank();
    if (rank == kTile && o.slot() < Program::kFirstFreeSlot)
      return {(o.slot() == Program::kScoreSlot ? scores : gradient) + r0 * f.ld, f.ld, 1};
    const int64_t by_row = varies_by_row(rank), by_lane = varies_by_lane(rank);
    const int64_t row = by_lane ? f.ld : kLanes<T>, rows = by_row ? kStripRows : 1;
    const int64_t slot = rank == kTile ? o.slot() - Program::kFirstFreeSlot : o.slot();
    return {memory.values[rank] + slot * rows * row, by_row * row, by_lane};
  }

  // Runs the program on each strip of rows, and then calls consume(r0, rows, result) with the strip's result.
  template <class Consume>
  void run(const Consume& consume) const {
    for (int64_t r0 = 0; r0 < f.rows(); r0 += kStripRows) {
      const int64_t rows = std::min(kStripRows, f.rows() - r0);
      for (int64_t n = 0; n < program.count(); ++n) {
        const Instruction in = program.at(n);
        if (in.operation() == Operation::scatter_add)
          scatter_add(in, r0, rows);
        else if (r0 == 0 || varies_by_row(in.target().rank()))
          execute(in, r0, step(in, r0, rows));
      }
      consume(r0, rows, source(program.result(), r0));
    }
  }

 private:
  ProgramStep<T> step(const Instruction& in, int64_t r0, int64_t rows) const {
    const Rank rank = in.target().rank();
    const ProgramSource<T> to = source(in.target(), r0);
    ProgramStep<T> s{varies_by_row(rank) ? rows : 1,
                     varies_by_lane(rank) ? f.ld : kLanes<T>,
                     const_cast<T*>(to.p),
                     to.row,
                     {source(in.operand(0), r0), source(in.operand(1), r0), source(in.operand(2), r0)}};
    // If no operand is only a row or only a column, a strip is one long row.
    bool is_flat = rank == kTile;
    for (int n = 0; n < 3; ++n) is_flat &= s.from[n].row == s.from[n].lane * f.ld;
    const bool has_position = in.operation() == Operation::query || in.operation() == Operation::key;
    if (is_flat && !has_position) {
      s.cols *= s.rows;
      s.rows = 1;
    }
    return s;
  }

  void positions(const ProgramStep<T>& s, bool in_lanes, int64_t first) const {
    map0<T>(s, [&](int64_t r, int64_t c) FA_INLINE_LAMBDA {
      return (V)(in_lanes ? iota<T>() + splat_index<T>(first + c) : splat_index<T>(first + r));
    });
  }

  void gather(const ProgramStep<T>& s, const void* captured, const Instruction& in) const {
    const T* elements = static_cast<const T*>(captured) + in.immediate(0);
    const int64_t last = in.immediate(1) - 1;
    if (s.from[0].lane == 0) {  // one element for all lanes of a row
      return map1<T>(s, [&](V index) FA_INLINE_LAMBDA {
        const I n = nearest_index<T>((I)index, last);
        std::remove_reference_t<decltype(std::declval<I>()[0])> bits;
        std::memcpy(&bits, elements + n[0], sizeof bits);
        return (V)splat_index<T>(bits);
      });
    }
    map1<T>(s, [&](V index) FA_INLINE_LAMBDA {
      const I n = nearest_index<T>((I)index, last);
      const int step = common_step<T>(n);
      if (step == 1) return load<T>(elements + n[0]);
      if (step == -1) return reversed<T>(load<T>(elements + n[kLanes<T> - 1]));
      if (step == 0) return splat<T>(elements[n[0]]);
      V result = {};
      for (int i = 0; i < kLanes<T>; ++i) std::memcpy(&((T*)&result)[i], elements + n[i], sizeof(T));
      return result;
    });
  }

  void scatter_add(const Instruction& in, int64_t r0, int64_t rows) const {
    const ProgramSource<T> index = source(in.operand(0), r0), value = source(in.operand(1), r0);
    const ProgramSource<T> weight{gradient + r0 * f.ld, f.ld, 1};
    const int64_t last = in.immediate(1) - 1;
    double* to = sums + in.immediate(0);
    const auto part = [&](int64_t r, int64_t c) FA_INLINE_LAMBDA {
      // A masked element has gradient 0, for every score.
      return weight.at(r, c) == T(0) ? V{} : value.at(r, c);
    };
    const auto position = [&](int64_t r, int64_t c) { return nearest_index<T>((I)index.at(r, c), last); };
    if (index.lane == 0) {
      V sum = {};
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < f.ld; c += kLanes<T>) sum += part(r, c);
        if (index.row == 0 && r + 1 < rows) continue;
        to[position(r, 0)[0]] += sum_lanes<T>(sum);
        sum = V{};
      }
      return;
    }
    for (int64_t c = 0; c < f.ld; c += kLanes<T>) {
      V sum = {};
      for (int64_t r = 0; r < rows; ++r) {
        sum += part(r, c);
        if (index.row == 0 && r + 1 < rows) continue;
        const I n = position(r, c);
        const int step = common_step<T>(n);
        if (step == 1 || step == -1) {
          const V in_order = step == 1 ? sum : reversed<T>(sum);
          double* const first = to + n[step == 1 ? 0 : kLanes<T> - 1];
          for (int i = 0; i < kLanes<T>; ++i) first[i] += in_order[i];
        } else {
          for (int i = 0; i < kLanes<T>; ++i) to[n[i]] += sum[i];
        }
        sum = V{};
      }
    }
  }

  void execute(const Instruction& in, int64_t r0, const ProgramStep<T>& s) const {
    const int64_t word = in.immediate(0);
    double number;
    std::memcpy(&number, &word, sizeof number);
    const auto fill = [&](V x) { map0<T>(s, [&](int64_t, int64_t) FA_INLINE_LAMBDA { return x; }); };
    switch (in.operation()) {
      case Operation::float_constant: return fill(splat<T>(static_cast<T>(number)));
      case Operation::int_constant: return fill((V)splat_index<T>(word));
      case Operation::bool_constant: return fill((V)splat_index<T>(word ? -1 : 0));
      case Operation::batch: return fill((V)splat_index<T>(f.b));
      case Operation::head: return fill((V)splat_index<T>(f.h));
      case Operation::query:
        return positions(s, f.lanes_are_queries, first_query + f.i0 + (f.lanes_are_queries ? 0 : r0));
      case Operation::key: return positions(s, !f.lanes_are_queries, f.j0 + (f.lanes_are_queries ? r0 : 0));
      case Operation::gather: return gather(s, functions.captured, in);
      case Operation::gather_int: return gather(s, functions.captured_ints, in);
      case Operation::wrap_index:
        return int_map1<T>(s, [&](I n) FA_INLINE_LAMBDA {
          return nearest_index<T>(n < 0 ? n + splat_index<T>(word) : n, word - 1);
        });
      default: return execute_arithmetic<T>(in.operation(), s);
    }
  }
};
