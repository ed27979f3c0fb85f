#include "check_program.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <string>
#include <vector>

namespace flash_attn_ext {
namespace {

constexpr int64_t kMostSlots = 4096;  // of one rank, as flex/program.py
constexpr char kUnset = ' ';

// The types of the values that were computed so far, by rank and slot.
class Values {
 public:
  Values(const Program& program, ProgramUse use) {
    for (int rank = 0; rank < 4; ++rank) {
      const int64_t slots = program.slots(rank);
      TORCH_CHECK_VALUE(slots >= (rank == kTile ? Program::kFirstFreeSlot : 0) && slots <= kMostSlots,
                        "programs: got ", slots, " slots of rank ", rank, "; allowed: ", kMostSlots,
                        " at most");
      types_[rank].assign(slots, kUnset);
    }
    if (use != ProgramUse::kMask) types_[kTile][Program::kScoreSlot] = 'F';
    if (use == ProgramUse::kGradient || use == ProgramUse::kCapturedGradient)
      types_[kTile][Program::kGradientSlot] = 'F';
  }

  char type_of(Operand o) const { return is_slot(o) ? types_[o.rank()][o.slot()] : kUnset; }
  void set(Operand o, char type) {
    TORCH_CHECK_VALUE(is_slot(o) && !(o.rank() == kTile && o.slot() < Program::kFirstFreeSlot),
                      "programs: got the target ", o.word, "; allowed: a slot that the header counts");
    types_[o.rank()][o.slot()] = type;
  }

 private:
  bool is_slot(Operand o) const { return o && o.slot() < static_cast<int64_t>(types_[o.rank()].size()); }

  std::vector<char> types_[4];
};

void check_range(const Instruction& in, int64_t elements) {
  const int64_t first = in.immediate(0), count = in.immediate(1);
  TORCH_CHECK_VALUE(first >= 0 && count >= 1 && first <= elements && count <= elements - first,
                    "programs: got an access to elements [", first, ", ", first, " + ", count, ") of ",
                    elements);
}

}  // namespace

Program check_program(const int64_t* words, int64_t count, ProgramUse use, int64_t captured,
                      int64_t captured_ints) {
  TORCH_CHECK_VALUE(count >= Program::kHeaderWords && words[0] == Program::kVersion,
                    "programs: got no program of version ", Program::kVersion);
  const Program program{words};
  TORCH_CHECK_VALUE(
      program.count() >= 0 && program.count() <= (count - Program::kHeaderWords) / Instruction::kWords,
      "programs: got ", program.count(), " instructions in ", count, " words");
  Values values(program, use);
  for (int64_t n = 0; n < program.count(); ++n) {
    const Instruction in = program.at(n);
    const int64_t number = static_cast<int64_t>(in.operation());
    TORCH_CHECK_VALUE(number >= 0 && number < static_cast<int64_t>(Operation::kCount),
                      "programs: got operation ", number);
    const OperationRow& row = kOperations[number];
    for (size_t a = 0; a < 3; ++a) {
      const bool is_wanted = a < std::strlen(row.arguments);
      const bool fits = is_wanted ? values.type_of(in.operand(a)) == row.arguments[a] : !in.operand(a);
      TORCH_CHECK_VALUE(fits, "programs: got the operand ", in.operand(a).word, " for argument ", a, " of ",
                        row.name, "; allowed: ", is_wanted ? "a value computed before, of its type" : "none");
    }
    switch (in.operation()) {
      case Operation::score:
      case Operation::gradient:
        TORCH_CHECK_VALUE(false, "programs: got ", row.name, " as an instruction");
        break;
      case Operation::gather: check_range(in, captured); break;
      case Operation::gather_int: check_range(in, captured_ints); break;
      case Operation::wrap_index:
        TORCH_CHECK_VALUE(in.immediate(0) >= 1, "programs: got an index into ", in.immediate(0), " elements");
        break;
      case Operation::scatter_add:
        TORCH_CHECK_VALUE(use == ProgramUse::kCapturedGradient,
                          "programs: got scatter_add in another program");
        check_range(in, captured);
        continue;  // without a target
      default: break;
    }
    values.set(in.target(), row.result);
  }
  if (use != ProgramUse::kCapturedGradient)
    TORCH_CHECK_VALUE(values.type_of(program.result()) == (use == ProgramUse::kMask ? 'B' : 'F'),
                      "programs: got the result ", program.result().word,
                      "; allowed: a value of the result's type");
  return program;
}

}  // namespace flash_attn_ext
