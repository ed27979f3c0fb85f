// The position of a tile in the matrix of scores, and the functions of a tile that instruction sets share.
#pragma once

#include <cstdint>

#include "../core/params.h"
#include "../core/program.h"

namespace flash_attn_ext::cpu {

// Position and layout of a tile. The forward stores S^T: rows are keys and lanes are queries, so row statistics are
// vectors, one lane per query. The backward stores S: rows are queries and lanes are keys, so K^T and V^T are packed
// once per key block.
struct TileFrame {
  int64_t b, h;
  int64_t i0, j0;         // first query, first key
  int64_t queries, keys;  // extents inside the tensor
  int64_t ld;             // lanes per row, whole vectors
  bool lanes_are_queries;

  int64_t rows() const { return lanes_are_queries ? keys : queries; }
  int64_t lanes() const { return lanes_are_queries ? queries : keys; }
};

enum class TileMask { kNone, kSome, kAll };  // how many of a tile's elements are masked

// Functions of one tile with float32 accumulators. They contain no product. So kernels with other products, which are the
// tables for bfloat16 and the int8 kernels, call the functions of the table without these products. A copy of the
// functions in each table would be the same machine code.
struct TileFunctions {
  TileMask (*load_bias_tile)(const MaskParams&, const TileFrame&, float* to);
  TileMask (*add_keys)(const MaskParams&, const TileFrame&, float* to);
  bool (*add_in_place)(const MaskParams&, const TileFrame&, float* scores);
  void (*load_dropout_tile)(const AttentionParams&, const TileFrame&, float* to);
  // `step` is a ProgramStep<float>. Each table has a type of this name, with the same members.
  void (*execute_arithmetic)(Operation, const void* step);
};

}  // namespace flash_attn_ext::cpu
