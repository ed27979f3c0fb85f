#include "key_lists.h"

namespace flash_attn_ext::cpu {
namespace {

constexpr int64_t kWord = 64;  // bits

// Returns whether the numbers are valid, ascending and without duplicates.
template <class Index>
bool is_sorted_row(const Index* numbers, int64_t count, int64_t limit) {
  for (int64_t n = 1; n < count; ++n)
    if (numbers[n - 1] >= numbers[n]) return false;
  return count == 0 || (numbers[0] >= 0 && numbers[count - 1] < limit);
}

// Sorts numbers below S_k in linear time by a set of bits. A duplicate sets a bit that is already set. `bits` is zero
// before and after.
template <class Index>
int32_t sort_row(const Index* numbers, int64_t count, int64_t limit, uint64_t* bits, int32_t* sorted) {
  if (is_sorted_row(numbers, count, limit)) {
    std::transform(numbers, numbers + count, sorted, [](Index n) { return static_cast<int32_t>(n); });
    return static_cast<int32_t>(count);
  }
  int64_t least = limit, most = -1;
  for (int64_t n = 0; n < count; ++n) {
    const int64_t number = numbers[n];
    if (number < 0 || number >= limit) continue;
    bits[number / kWord] |= uint64_t{1} << (number % kWord);
    least = std::min(least, number);
    most = std::max(most, number);
  }
  int32_t length = 0;
  for (int64_t word = least / kWord; word <= most / kWord && most >= 0; ++word) {
    for (uint64_t left = bits[word]; left; left &= left - 1)
      sorted[length++] = static_cast<int32_t>(word * kWord + __builtin_ctzll(left));
    bits[word] = 0;
  }
  return length;
}

int64_t count_rows(const Sizes& z, const KeyIndices& indices) {
  return (indices.stride_b ? z.batch : 1) * (indices.stride_h ? z.heads_kv : 1) * z.seqlen_q;
}

}  // namespace

KeyLists allocate_key_lists(Arena& arena, const Sizes& z, const KeyIndices& indices, int threads) {
  KeyLists lists;
  lists.indices = &indices;
  lists.rows = indices.count == 0 ? 0 : count_rows(z, indices);
  const int64_t limit = (z.seqlen_k + indices.block_size - 1) / indices.block_size;
  lists.words = (limit + kWord - 1) / kWord;
  lists.entries = arena.take<int32_t>(lists.rows * indices.count);
  lists.lengths = arena.take<int32_t>(lists.rows);
  lists.bits = arena.take<uint64_t>(lists.words * threads);
  return lists;
}

void fill_key_lists(const KeyLists& lists, const Parallel& parallel) {
  constexpr int64_t kRows = 4;  // rows of a task
  const KeyIndices& indices = *lists.indices;
  std::fill(lists.bits, lists.bits + lists.words * std::max(parallel.threads, 1), uint64_t{0});
  for_each_task(parallel, (lists.rows + kRows - 1) / kRows, [&](int64_t task, int thread) {
    uint64_t* bits = lists.bits + thread * lists.words;
    const int64_t end = std::min((task + 1) * kRows, lists.rows);
    for (int64_t row = task * kRows; row < end; ++row) {
      const int64_t at = row * indices.count;
      const auto sort = [&](const auto* numbers) {
        return sort_row(numbers + at, indices.count, lists.words * kWord, bits, lists.entries + at);
      };
      lists.lengths[row] = indices.numbers.is_int64 ? sort(static_cast<const int64_t*>(indices.numbers.data))
                                                    : sort(static_cast<const int32_t*>(indices.numbers.data));
    }
  });
}

}  // namespace flash_attn_ext::cpu
