#include "functions.h"

#include <algorithm>
#include <cstring>

#include "flex.h"

namespace flash_attn_ext::cuda::simt {
namespace {

int64_t values_of(const Program& program) {
  int64_t values = 0;
  for (int rank = 0; rank < 4; ++rank) values += program.slots(rank);
  return values;
}

// The values of a program in one row: tiles first, so that the score is value 0 and the gradient value 1.
struct ValueRow {
  int64_t first[4];

  explicit ValueRow(const Program& program) {
    int64_t next = 0;
    for (int rank = kTile; rank >= kUniform; --rank) {
      first[rank] = next;
      next += program.slots(rank);
    }
  }
  int16_t at(Operand o) const { return o ? static_cast<int16_t>(first[o.rank()] + o.slot()) : -1; }
};

int64_t bits_of_constant(int64_t word, DType dtype) {
  if (dtype == DType::kFloat64) return word;
  double number;
  std::memcpy(&number, &word, sizeof number);
  const float rounded = static_cast<float>(number);
  int32_t bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  return bits;
}

DeviceProgram append(DeviceFunctions& to, int64_t& count, const Program& program, DType dtype) {
  if (!program) return {};
  const ValueRow row(program);
  const DeviceProgram appended{static_cast<int32_t>(count), static_cast<int32_t>(program.count()),
                               row.at(program.result())};
  for (int64_t n = 0; n < program.count(); ++n) {
    const Instruction in = program.at(n);
    const bool is_float = in.operation() == Operation::float_constant;
    to.instructions[count++] = {
        {is_float ? bits_of_constant(in.immediate(0), dtype) : in.immediate(0), in.immediate(1)},
        static_cast<int16_t>(in.operation()),
        row.at(in.target()),
        {row.at(in.operand(0)), row.at(in.operand(1)), row.at(in.operand(2))},
        0};
  }
  return appended;
}

// Whether the programs fit into DeviceFunctions.
bool fits(const UserFunctions& functions) {
  int64_t instructions = 0, values = 0;
  for (const Program* const each :
       {&functions.score, &functions.gradient, &functions.captured_gradient, &functions.mask}) {
    const Program& program = *each;
    if (!program || (each == &functions.captured_gradient && !functions.dcaptured)) continue;
    instructions += program.count();
    values = std::max(values, values_of(program));
  }
  return instructions <= DeviceFunctions::kMostInstructions && values <= DeviceFunctions::kMostValues;
}

}  // namespace

const char* why_not_functions(const AttentionParams& p) {
  if (!p.functions) return nullptr;
  const CacheParams& cache = p.varlen.cache;
  if (cache.pages || cache.dtype != CacheDType::kOfQuery || cache.tree_mask)
    return "simt: functions of the user with pages, 8-bit caches or a tree mask are for the CPU only so far";
  return fits(*p.functions) ? nullptr
                            : "simt: functions of the user with more than 384 instructions or 64 values";
}

const char* why_not_functions(const BackwardParams& p) {
  if (!p.functions) return nullptr;
  return why_not_functions(static_cast<const AttentionParams&>(p));
}

DeviceFunctions device_functions(const UserFunctions& functions, DType dtype, const CapturedSums& sums) {
  DeviceFunctions to = {};
  int64_t count = 0;
  to.score = append(to, count, functions.score, dtype);
  to.gradient = append(to, count, functions.gradient, dtype);
  if (sums) to.captured_gradient = append(to, count, functions.captured_gradient, dtype);
  to.mask = append(to, count, functions.mask, dtype);
  to.captured_sums = sums;
  to.captured = functions.captured;
  to.captured_ints = functions.captured_ints;
  to.blocks = functions.blocks;
  return to;
}

int32_t log2_contributions(const BackwardParams& p) {
  const Sizes& z = p.sizes;
  const Program& program = p.functions->captured_gradient;
  int64_t per_element = 1;  // additions of one element of the score matrix
  for (int64_t n = 0; n < program.count(); ++n)
    per_element += program.at(n).operation() == Operation::scatter_add;
  const int64_t most = z.batch * z.heads * z.seqlen_q * z.seqlen_k * per_element;
  int32_t log2 = 0;
  while (most >> log2 > 0) ++log2;
  return log2;
}

}  // namespace flash_attn_ext::cuda::simt
