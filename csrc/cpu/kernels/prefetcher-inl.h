// Prefetches the rows of K and V that decode reads next.
#pragma once

#include "cache_rows-inl.h"

// Returns the number of cache lines of `count` elements.
template <class In>
constexpr int64_t lines_of(int64_t count) {
  return ceil_div(count * static_cast<int64_t>(sizeof(In)), 64);
}

// Returns whether rows are prefetched. K and V of a small dense call are probably in L2 already. Then a prefetch takes
// as long as a load. Two cores of most CPUs with AVX-512 have 2 MiB of L2 or more. Only float32 counts on them: other types,
// and AVX2, are slower without prefetches if K and V come from L3.
inline bool prefetches_rows(const AttentionParams& p, int threads) {
  constexpr int64_t kBytesInL2 = 1 << 20;
  const Sizes& z = p.sizes;
  const bool counts_two = FA_VECTOR_BYTES == 64 && p.dtype == DType::kFloat32 && threads > 1;
  return p.varlen || z.batch * z.heads_kv * z.seqlen_k * (z.head_dim + z.head_dim_v) * bytes_of(p.dtype) >
                         (counts_two ? 2 : 1) * kBytesInL2;
}

// How far ahead rows are prefetched.
struct PrefetchDistance {
  int64_t rows;  // whole chunks
  bool is_tile;  // a whole tile: keys are prefetched during work on keys, and values during work on values

  // For a tile of `block_k` rows. `queries`: the rows of Q that each row is multiplied with. `element`: bytes of an element in
  // memory. Enough bytes hide the latency. Measured with AVX-512: few queries are fast with 16 KiB, or 8 KiB of 16-bit elements.
  // With 8 KiB of float32, 4 queries take 0.97 of the time in memory, but 1.10 in L3. Products of many queries take longer, so
  // that 64 KiB are better, or 32 KiB of float32 (0.93 to 1.00 of the time).
  static PrefetchDistance of(const TileSource& source, const HeadRange& heads, int64_t block_k,
                             int64_t queries, int64_t element) {
    const int64_t few = element == 2 ? 8 << 10 : 16 << 10, many = element == 4 ? 32 << 10 : 64 << 10;
    const int64_t bytes = FA_VECTOR_BYTES < 64 ? 32 << 10 : queries < 8 ? few : many;
    const int64_t row = heads.count * source.bytes;
    // Several heads take turns. With 32 keys instead of 16, 1 query takes 1.0 to 1.1 of the time, and 4 queries take 0.9. With 32
    // keys instead of 64, 16 queries take up to 1.1. AVX2: from 7 queries on a head's turn is 64 values (DecodeForm::value_step()).
    const int64_t most_of_short_turns = FA_VECTOR_BYTES == 32 ? 6 : 8;
    int64_t rows = heads.count == 1 || queries < 3  ? kChunkRows
                   : queries <= most_of_short_turns ? 2 * kChunkRows
                                                    : kDecodeKeys;
    // Several rows of Q: up to 64 rows of 8 and 4 bits are widened at once, head after head. With 64 keys instead of 32, 4 heads a
    // key head take 0.78 (float8) to 0.93 (int4) of the time on AVX2 (Zen 3, 8 key heads). Not measured on AVX-512.
    if (FA_VECTOR_BYTES < 64 && element == 1 && heads.count > 1 && queries > 1)
      rows = std::max(rows, std::min(kDecodeKeys, (64 << 10) / row / kChunkRows * kChunkRows));
    while (rows < block_k && rows * row < bytes) rows += kChunkRows;
    return {rows, rows >= block_k};
  }
};

// Prefetches rows of some heads: first the rest of `current`, then the start of `next`, in memory order.
// Prefetches a few lines at a time: too many at once would stall each other and the computation.
class Prefetcher {
 public:
  Prefetcher() = default;
  Prefetcher(const TileSource& current, const TileSource& next, const HeadRange& heads,
             const PrefetchDistance& distance)
      : heads_(heads),
        source_(&current),
        next_(&next),
        ahead_(distance.rows),
        row_(ahead_),
        end_row_(rows_of(current)) {}

  // Prefetches the rows [first, last) of one tile.
  Prefetcher(const TileSource& source, int64_t first, int64_t last, const HeadRange& heads)
      : heads_(heads),
        source_(&source),
        next_(&source),
        row_(first),
        end_row_(std::min(rows_of(source), last)) {}

  // Always inline, because GCC 12 removes calls of a function that only prefetches. Lines of one row take few instructions
  // and no call: a call would store the sums that the caller has in registers.
  FA_INLINE void lines(int64_t count) {
    if (at_ >= end_ && rows_left_ > 0) next_row_of_run();
    const int64_t stored = count >> log2_parts_;
    if (stored << log2_parts_ == count && end_ - at_ >= stored * kLine) {
      const char* from = at_;
      for (int64_t n = 0; n < stored; ++n) prefetch(from + n * kLine);
      at_ = from + stored * kLine;
    } else if (__builtin_expect(source_ != nullptr, false)) {
      lines_of_some_rows(count);
    }
  }
  // After this call, lines(count) prefetches count / 2^log2 lines: the caller's elements are wider than the stored ones, or
  // the caller reads each row several times.
  void divide_lines(int log2) { log2_parts_ = log2; }
  // Prefetches all remaining lines.
  void finish() {
    if (source_) lines_of_some_rows(std::numeric_limits<int64_t>::max() / 2);
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes

  static int64_t rows_of(const TileSource& source) { return source.known ? source.rows : 0; }

  FA_INLINE void next_row_of_run() {
    --rows_left_;
    at_ = end_ + source_->stride - row_bytes_;
    end_ = at_ + row_bytes_;
  }
  FA_INLINE static void prefetch(const char* line) { __builtin_prefetch(line, 0, kPrefetchIntoL1); }
  __attribute__((noinline)) void lines_of_some_rows(int64_t count) {
    due_ += count;
    const int64_t stored = due_ >> log2_parts_;
    due_ -= stored << log2_parts_;
    for (int64_t n = 0; n < stored; ++n, at_ += kLine) {
      if (at_ >= end_ && !find_row()) return;
      prefetch(at_);
    }
  }
  bool find_row() {
    if (rows_left_ > 0) {
      next_row_of_run();
      return true;
    }
    while (row_ >= end_row_) {
      if (source_ == next_) {
        source_ = nullptr;  // no row is left
        at_ = end_ = nullptr;
        return false;
      }
      source_ = next_;
      row_ = 0;
      end_row_ = std::min(rows_of(*next_), ahead_);
    }
    at_ = source_->row(heads_.first + head_, row_);
    end_ = at_ + source_->bytes;
    const bool has_adjacent_heads = source_->stride_h == source_->bytes;
    if (has_adjacent_heads) end_ = at_ + heads_.count * source_->bytes;  // as one row
    if (has_adjacent_heads || heads_.count == 1) {
      const int64_t end_of_run = std::min(source_->end_of_run(row_), end_row_);
      rows_left_ = end_of_run - row_ - 1;
      row_ = end_of_run;
      row_bytes_ = end_ - at_;
      if (source_->stride == row_bytes_) {  // the run is as one row
        end_ += rows_left_ * row_bytes_;
        rows_left_ = 0;
        // The next run often follows. A CPU's own prefetch does not cross a page, so this starts it there.
        for (int64_t n = 0; n < 3; ++n) prefetch(end_ + n * kLine);
      }
    } else if (++head_ == heads_.count) {
      head_ = 0;
      ++row_;
    }
    return true;
  }

  HeadRange heads_{};
  const TileSource *source_ = nullptr, *next_ = nullptr;
  int log2_parts_ = 0;
  int64_t due_ = 0;  // the caller's lines that are less than a line to prefetch
  int64_t ahead_ = 0;
  int64_t row_ = 0, end_row_ = 0, head_ = 0;
  int64_t rows_left_ = 0, row_bytes_ = 0;  // of the current run, if its heads are one or adjacent
  const char *at_ = nullptr, *end_ = nullptr;
};
