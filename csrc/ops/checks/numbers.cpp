// Checks the numbers in index tensors on CPU: offsets, lengths, positions, numbers of caches and pages. A caller may pass
// any int64: no sum or product here may overflow before its terms are checked.
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <limits>

#include "../dense/pack_params.h"
#include "checks.h"

namespace flash_attn_ext {
namespace {

// The numbers of an index tensor, read in place: a table of pages may have millions of numbers.
class Numbers {
 public:
  Numbers() = default;
  explicit Numbers(const at::Tensor& t)
      : kept_(t.contiguous()), offsets_(pack_offsets(kept_)), size_(static_cast<size_t>(t.numel())) {}
  explicit Numbers(const OptionalTensor& t) : Numbers(t ? Numbers(*t) : Numbers()) {}

  int64_t operator[](size_t n) const { return offsets_[static_cast<int64_t>(n)]; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

 private:
  at::Tensor kept_;
  Offsets offsets_{};
  size_t size_ = 0;
};

void check_sequences(const char* side, const at::Tensor& cu_seqlens, const OptionalTensor& seqused,
                     int64_t total, int64_t longest) {
  const Numbers offsets(cu_seqlens);
  const int64_t first = offsets[0], last = offsets[offsets.size() - 1];
  const std::string name = std::string("cu_seqlens_") + side;
  TORCH_CHECK_VALUE(first == 0 && last == total, name, ": got offsets from ", first, " to ", last,
                    "; allowed: from 0 to ", total, ", the rows of ", *side == 'q' ? "query" : "key");
  const Numbers used(seqused);
  for (size_t b = 0; b + 1 < offsets.size(); ++b) {
    TORCH_CHECK_VALUE(offsets[b] <= offsets[b + 1] && offsets[b + 1] <= total, name, ": got ", offsets[b + 1],
                      " after ", offsets[b], " at ", b + 1, "; allowed: ascending offsets");
    const int64_t length = offsets[b + 1] - offsets[b];  // no overflow: both are in [0, total]
    TORCH_CHECK_VALUE(length <= longest, "max_seqlen_", side, ": got ", longest,
                      "; allowed: at least the longest sequence's ", length, " rows");
    TORCH_CHECK_VALUE(used.empty() || (used[b] >= 0 && used[b] <= length), "seqused_", side, ": got ",
                      used.empty() ? 0 : used[b], " at ", b, "; allowed: 0 to the sequence's ", length,
                      " rows");
  }
}

void check_range(const char* name, int64_t b, int64_t number, int64_t low, int64_t high) {
  TORCH_CHECK_VALUE(low <= number && number <= high, name, ": got ", number, " at ", b, "; allowed: ", low,
                    " to ", high);
}

// Checks the positions of the rows that a sequence rotates: its new keys and its queries.
void check_positions(const char* name, const OptionalTensor& table, int64_t first, int64_t rows) {
  if (!table || rows == 0) return;
  const int64_t positions = table->size(0);
  // `first` is any int64: first + rows may overflow. Here it is clamped for the message only.
  const int64_t last = std::min(first, std::numeric_limits<int64_t>::max() - rows) + rows - 1;
  TORCH_CHECK_VALUE(first >= 0 && first <= positions - rows, name, ": got positions ", first, " to ", last,
                    "; allowed: 0 to ", positions - 1, ", the rows of ", name);
}

// Kernels write the rows in any order: no element may be written twice, and no input may be overwritten.
void check_no_overlap(const char* name, const at::Tensor& t, const char* other, const at::Tensor& of) {
  const at::MemOverlapStatus status = at::get_overlap_status(t, of);
  TORCH_CHECK_VALUE(status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, name,
                    ": got a tensor that shares memory with ", other, "; allowed: memory of its own");
}

void check_memory(const AppendTensors& in) {
  std::vector<std::pair<const char*, at::Tensor>> written = {{"key_cache", in.key_cache},
                                                             {"value_cache", in.value_cache}};
  const auto add = [&](const char* name, const OptionalTensor& t) {
    if (t) written.emplace_back(name, *t);
  };
  add("k_scales", in.key_group_scale);
  add("v_scales", in.value_group_scale);
  add("k_zeros", in.key_group_zero);
  add("v_zeros", in.value_group_zero);
  for (size_t n = 0; n < written.size(); ++n) {
    const auto& [name, cache] = written[n];
    TORCH_CHECK_VALUE(at::has_internal_overlap(cache) != at::MemOverlap::Yes, name, ": got strides ",
                      cache.strides(), " for shape ", cache.sizes(),
                      ", elements that share memory; allowed: one address for each element, because rows are "
                      "written to it");
    check_no_overlap("query", in.query, name, cache);
    check_no_overlap("key", in.key, name, cache);
    check_no_overlap("value", in.value, name, cache);
    for (size_t m = 0; m < n; ++m) check_no_overlap(name, cache, written[m].first, written[m].second);
  }
}

// The new rows of sequence `b` in one cache or page. Rows are counted over all caches or pages.
struct WrittenRows {
  int64_t begin, end;
  size_t b;
};

void check_written_once(const char* name, std::vector<WrittenRows>& written, int64_t rows) {
  std::sort(written.begin(), written.end(), [](const auto& x, const auto& y) { return x.begin < y.begin; });
  for (size_t n = 1; n < written.size(); ++n)
    TORCH_CHECK_VALUE(written[n - 1].end <= written[n].begin, name, ": got row ", written[n].begin % rows,
                      " of ", written[n].begin / rows, " for new keys of sequences ", written[n - 1].b,
                      " and ", written[n].b, "; allowed: each row written once");
}
}  // namespace

void check_numbers(const VarlenTensors& in, const VarlenOptions& options) {
  const int64_t total_q = in.query.size(0), total_k = in.key.size(0);
  check_sequences("q", in.cu_seqlens_q, in.seqused_q, total_q,
                  options.max_seqlen_q ? options.max_seqlen_q->expect_int() : total_q);
  check_sequences("k", in.cu_seqlens_k, in.seqused_k, total_k,
                  options.max_seqlen_k ? options.max_seqlen_k->expect_int() : total_k);
}

void check_numbers(const CacheTensors& in, const CacheOptions& options) {
  const int64_t total_q = in.query.size(0), rows = in.key.size(1);
  check_sequences("q", in.cu_seqlens_q, std::nullopt, total_q,
                  options.max_seqlen_q ? options.max_seqlen_q->expect_int() : total_q);
  const int64_t pages = in.block_table ? in.block_table->size(1) : 1, caches = in.key.size(0);
  const Numbers used(in.seqused_k), batch_idx(in.batch_idx), leftpad(in.leftpad), table(in.block_table);
  TORCH_CHECK_VALUE(in.block_table || in.batch_idx || caches >= static_cast<int64_t>(used.size()),
                    "key: got ", caches, " caches; allowed: at least one for each of the ", used.size(),
                    " sequences");
  for (size_t b = 0; b < used.size(); ++b) {
    check_range("cache_seqlens", b, used[b], 0, rows * pages);
    if (!batch_idx.empty()) check_range("cache_batch_idx", b, batch_idx[b], 0, caches - 1);
    if (!leftpad.empty()) check_range("cache_leftpad", b, leftpad[b], 0, used[b]);
    for (int64_t n = 0; in.block_table && n * rows < used[b]; ++n)
      check_range("block_table", b, table[b * pages + n], 0, caches - 1);
  }
}

void check_numbers(const AppendTensors& in, const AppendOptions& options) {
  check_memory(in);
  check_sequences("q", in.cu_seqlens_q, std::nullopt, in.query.size(0), in.query.size(0));
  check_sequences("k_new", in.cu_seqlens_k_new, std::nullopt, in.key.size(0), in.key.size(0));
  const Numbers offsets_q(in.cu_seqlens_q), offsets(in.cu_seqlens_k_new);
  const Numbers used(in.cache_seqlens), leftpad(in.cache_leftpad), positions(in.rotary_seqlens);
  const Numbers batch_idx(in.cache_batch_idx), table(in.block_table);
  const int64_t rows = in.key_cache.size(1), caches = in.key_cache.size(0);
  const int64_t pages = in.block_table ? in.block_table->size(1) : 1;
  const int64_t capacity = rows * pages;
  std::vector<WrittenRows> written;
  for (size_t b = 0; b < used.size(); ++b) {
    check_range("cache_seqlens", b, used[b], 0, capacity);
    const int64_t begin = used[b], end = begin + offsets[b + 1] - offsets[b];
    const int64_t queries = offsets_q[b + 1] - offsets_q[b];
    TORCH_CHECK_VALUE(begin == end || end <= capacity, "cache_seqlens: got new rows at ", begin, " to ",
                      end - 1, "; allowed: 0 to ", capacity - 1);
    if (!leftpad.empty()) check_range("cache_leftpad", b, leftpad[b], 0, begin);
    const int64_t first = positions.empty() ? begin : positions[b];
    const int64_t rotated =
        std::max(end - begin, options.advance_query_positions ? queries : std::min<int64_t>(queries, 1));
    check_positions("rotary_cos", in.rotary_cos, first, rotated);
    check_positions("rotary_sin", in.rotary_sin, first, rotated);
    if (begin == end) continue;
    if (in.block_table) {
      for (int64_t n = begin / rows; n <= (end - 1) / rows; ++n) {
        const int64_t page = table[b * pages + n];
        check_range("block_table", b, page, 0, caches - 1);
        written.push_back({page * rows + std::max<int64_t>(begin - n * rows, 0),
                           page * rows + std::min(end - n * rows, rows), b});
      }
    } else if (in.cache_batch_idx) {
      check_range("cache_batch_idx", b, batch_idx[b], 0, caches - 1);
      written.push_back({batch_idx[b] * rows + begin, batch_idx[b] * rows + end, b});
    } else {
      TORCH_CHECK_VALUE(static_cast<int64_t>(b) < caches, "key_cache: got ", caches,
                        " caches; allowed: at least one for each of the ", used.size(), " sequences");
    }
  }
  check_written_once(in.block_table ? "block_table" : "cache_batch_idx", written, rows);
}

}  // namespace flash_attn_ext
