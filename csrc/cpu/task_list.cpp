#include "task_list.h"

#include <algorithm>

namespace flash_attn_ext {

template AttentionParams of_sequence(AttentionParams, int64_t);
template BackwardParams of_sequence(BackwardParams, int64_t);
template JvpParams of_sequence(JvpParams, int64_t);
template DoubleBackwardParams of_sequence(DoubleBackwardParams, int64_t);

}  // namespace flash_attn_ext

namespace flash_attn_ext::cpu {

TaskList::Task TaskList::at(int64_t n) const {
  if (!sequences) return {0, n};
  // The last sequence that begins at or before n. Earlier sequences with the same first task have no tasks.
  const Sequence* next = std::upper_bound(sequences, sequences + count, n,
                                          [](int64_t n, const Sequence& s) { return n < s.first_task; });
  return {next[-1].b, n - next[-1].first_task};
}

int64_t order_sequences(TaskList::Sequence* sequences, int64_t count) {
  std::sort(sequences, sequences + count, [](const TaskList::Sequence& x, const TaskList::Sequence& y) {
    return x.weight != y.weight ? x.weight > y.weight : x.b < y.b;
  });
  int64_t total = 0;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t tasks = sequences[n].first_task;
    sequences[n].first_task = total;
    total += tasks;
  }
  return total;
}

double visible_pairs(const AttentionParams& p) {
  constexpr int64_t kStep =
      64;  // exact for sequences of one block; otherwise an estimate to compare sequences
  double pairs = 0;
  for (int64_t i = 0; i < p.sizes.seqlen_q; i += kStep) {
    const int64_t rows = std::min(kStep, p.sizes.seqlen_q - i);
    const Range keys = visible_keys(p.band, i, i + rows, p.sizes.seqlen_k);
    if (keys.begin < keys.end)
      pairs += static_cast<double>(keys.end - keys.begin) * static_cast<double>(rows);
  }
  return pairs;
}

}  // namespace flash_attn_ext::cpu
