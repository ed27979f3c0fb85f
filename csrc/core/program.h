// A function of the user on scores, as data. flash_attn_ext/flex/program.py encodes it, and the kernels interpret it.
//
// A program is an array of words. Its header: version, number of instructions, slots of each rank (uniform, query, key,
// tile), the operand of the result or -1, 0. Each instruction: operation, target operand, three operands, two immediates,
// 0. An operand is 4 * slot + rank, or -1. Slots 0 and 1 of tiles are the scores and the gradient of the result.
#pragma once

#include <cstdint>

#include "host_device.h"
#include "params.h"

namespace flash_attn_ext {

// clang-format off
// Each row: name, types of the arguments, type of the result. F: a number of the accumulators' type. I: an integer of the
// same width. B: a bool. - : none.
#define FA_PROGRAM_OPERATIONS(X) \
  X(float_constant, "", 'F')                         \
  X(int_constant, "", 'I')                           \
  X(bool_constant, "", 'B')                          \
  X(batch, "", 'I')                                  \
  X(head, "", 'I')                                   \
  X(query, "", 'I')                                  \
  X(key, "", 'I')                                    \
  X(score, "", 'F')                                  \
  X(gradient, "", 'F')                               \
  X(add, "FF", 'F')                                  \
  X(subtract, "FF", 'F')                             \
  X(multiply, "FF", 'F')                             \
  X(divide, "FF", 'F')                               \
  X(minimum, "FF", 'F')                              \
  X(maximum, "FF", 'F')                              \
  X(power, "FF", 'F')                                \
  X(negate, "F", 'F')                                \
  X(absolute, "F", 'F')                              \
  X(sign, "F", 'F')                                  \
  X(floor, "F", 'F')                                 \
  X(ceil, "F", 'F')                                  \
  X(truncate, "F", 'F')                              \
  X(round, "F", 'F')                                 \
  X(square_root, "F", 'F')                           \
  X(reciprocal_root, "F", 'F')                       \
  X(exp, "F", 'F')                                   \
  X(exp2, "F", 'F')                                  \
  X(expm1, "F", 'F')                                 \
  X(log, "F", 'F')                                   \
  X(log2, "F", 'F')                                  \
  X(log1p, "F", 'F')                                 \
  X(tanh, "F", 'F')                                  \
  X(sigmoid, "F", 'F')                               \
  X(erf, "F", 'F')                                   \
  X(sine, "F", 'F')                                  \
  X(cosine, "F", 'F')                                \
  X(select, "BFF", 'F')                              \
  X(less, "FF", 'B')                                 \
  X(less_equal, "FF", 'B')                           \
  X(equal, "FF", 'B')                                \
  X(int_add, "II", 'I')                              \
  X(int_subtract, "II", 'I')                         \
  X(int_multiply, "II", 'I')                         \
  X(int_divide, "II", 'I')                           \
  X(int_truncated_divide, "II", 'I')                 \
  X(int_modulo, "II", 'I')                           \
  X(int_minimum, "II", 'I')                          \
  X(int_maximum, "II", 'I')                          \
  X(int_absolute, "I", 'I')                          \
  X(int_and, "II", 'I')                              \
  X(int_or, "II", 'I')                               \
  X(int_xor, "II", 'I')                              \
  X(int_not, "I", 'I')                               \
  X(shift_left, "II", 'I')                           \
  X(shift_right, "II", 'I')                          \
  X(int_select, "BII", 'I')                          \
  X(int_less, "II", 'B')                             \
  X(int_less_equal, "II", 'B')                       \
  X(int_equal, "II", 'B')                            \
  X(bool_and, "BB", 'B')                             \
  X(bool_or, "BB", 'B')                              \
  X(bool_xor, "BB", 'B')                             \
  X(bool_not, "B", 'B')                              \
  X(int_to_float, "I", 'F')                          \
  X(float_to_int, "F", 'I')                          \
  X(bool_to_int, "B", 'I')                           \
  X(wrap_index, "I", 'I')                            \
  X(gather, "I", 'F')                                \
  X(gather_int, "I", 'I')                            \
  X(scatter_add, "IF", 'F')
// clang-format on

enum class Operation : int64_t {
#define FA_OPERATION_NAME(name, ...) name,
  FA_PROGRAM_OPERATIONS(FA_OPERATION_NAME)
#undef FA_OPERATION_NAME
      kCount
};

struct OperationRow {
  const char* name;
  const char* arguments;
  char result;
};
constexpr OperationRow kOperations[] = {
#define FA_OPERATION_ROW(name, arguments, result) {#name, arguments, result},
    FA_PROGRAM_OPERATIONS(FA_OPERATION_ROW)
#undef FA_OPERATION_ROW
};

// The indices that a value depends on, as bits. A value of rank kQuery is the same for all keys.
enum Rank : int { kUniform = 0, kQuery = 1, kKey = 2, kTile = 3 };

struct Operand {
  int64_t word;

  explicit operator bool() const { return word >= 0; }
  Rank rank() const { return static_cast<Rank>(word & 3); }
  int64_t slot() const { return word >> 2; }
};

struct Instruction {
  static constexpr int64_t kWords = 8;
  const int64_t* words;

  Operation operation() const { return static_cast<Operation>(words[0]); }
  Operand target() const { return {words[1]}; }
  Operand operand(int n) const { return {words[2 + n]}; }
  int64_t immediate(int n) const { return words[5 + n]; }
};

struct Program {
  static constexpr int64_t kVersion = 1, kHeaderWords = 8;
  static constexpr int64_t kScoreSlot = 0, kGradientSlot = 1, kFirstFreeSlot = 2;  // of tiles
  const int64_t* words = nullptr;                                                  // null: no function

  explicit operator bool() const { return words != nullptr; }
  int64_t count() const { return words[1]; }
  int64_t slots(int rank) const { return words[2 + rank]; }
  Operand result() const { return {words[6]}; }
  Instruction at(int64_t n) const { return {words + kHeaderWords + n * Instruction::kWords}; }
};

// Which blocks of the score matrix are visible: torch's BlockMask.
struct BlockStates {
  enum State : uint8_t { kHidden = 0, kPartial = 1, kFull = 2 };  // kPartial: the mask's program decides

  const uint8_t* data =
      nullptr;  // (B, H, rows, cols), broadcast by zero strides; null: every block is partial
  int64_t stride_b = 0, stride_h = 0, rows = 0, cols = 0;
  int64_t block_q = 1, block_k = 1;
  // In a cache with fewer keys than queries, the first queries have a negative index. No block of the mask holds these
  // queries. So the states of a cache have one more row before the mask, with partial blocks. Functions here count
  // queries from the first row: the caller adds `queries_before` to the index.
  int64_t queries_before = 0;

  FA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
  // The row of blocks of query i, the column of key j. The first and the last blocks extend to the ends of the score
  // matrix.
  FA_HOST_DEVICE int64_t row_of(int64_t i) const {
    const int64_t row = (i < 0 ? 0 : i) / block_q;
    return row < rows ? row : rows - 1;
  }
  FA_HOST_DEVICE int64_t col_of(int64_t j) const {
    const int64_t col = j / block_k;
    return col < cols ? col : cols - 1;
  }
  FA_HOST_DEVICE const uint8_t* of_head(int64_t b, int64_t h) const {
    return data + b * stride_b + h * stride_h;
  }
  // The state of the block that holds element (i, j).
  FA_HOST_DEVICE uint8_t at(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return of_head(b, h)[row_of(i) * cols + col_of(j)];
  }
};

// The lowest and the highest state of the blocks that a tile meets.
struct StatesOfTile {
  uint8_t lowest = BlockStates::kFull, highest = BlockStates::kHidden;

  // Queries [i_begin, i_end) and keys [j_begin, j_end). `has_mask`: without a mask function, a partial block is full.
  FA_HOST_DEVICE StatesOfTile(const BlockStates& blocks, bool has_mask, int64_t b, int64_t h, int64_t i_begin,
                              int64_t i_end, int64_t j_begin, int64_t j_end) {
    if (!blocks) {
      lowest = highest = has_mask ? BlockStates::kPartial : BlockStates::kFull;
      has_partial = has_mask;
      return;
    }
    const int64_t last_row = blocks.row_of(i_end - 1), last_col = blocks.col_of(j_end - 1);
    for (int64_t row = blocks.row_of(i_begin); row <= last_row; ++row)
      for (int64_t col = blocks.col_of(j_begin); col <= last_col; ++col) {
        uint8_t state = blocks.of_head(b, h)[row * blocks.cols + col];
        if (state == BlockStates::kPartial && !has_mask) state = BlockStates::kFull;
        lowest = state < lowest ? state : lowest;
        highest = state > highest ? state : highest;
        has_partial |= state == BlockStates::kPartial;
      }
  }

  FA_HOST_DEVICE bool is_hidden() const { return highest == BlockStates::kHidden; }
  FA_HOST_DEVICE bool is_full() const { return lowest == BlockStates::kFull; }
  FA_HOST_DEVICE bool is_partial() const { return has_partial; }  // some block needs the mask function

 private:
  bool has_partial = false;
};

// The index that functions of the user get for query 0 of one sequence's call. In a cache the last query has the index of
// the last key.
FA_HOST_DEVICE inline int64_t first_query_index(const AttentionParams& p) {
  return p.varlen.cache.first_masked;
}

// The user's functions: of scores, which come after softcap and ALiBi, and of masks.
struct UserFunctions {
  Program score;                        // the new score
  Program gradient;                     // the gradient of the old score, from the gradient of the new one
  Program captured_gradient;            // adds to the gradients of captured elements
  Program mask;                         // whether a query sees a key
  const void* captured = nullptr;       // elements that programs read, accumulators' type
  const void* captured_ints = nullptr;  // integers as wide
  int64_t captured_count = 0;
  BlockStates blocks;
  void* dcaptured = nullptr;  // captured_count elements, accumulators' type; null: not wanted

  bool hides() const { return mask || blocks; }
};

}  // namespace flash_attn_ext
