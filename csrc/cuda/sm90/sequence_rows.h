// The rows of packed sequences, as the persistent blocks of the forward read them.
//
// ptxas keeps descriptors in uniform registers only if a block finds its task without branches and without loads of bytes
// (forward_range.cuh). of_sequence() has both. These functions give the same rows by unconditional loads of words.
#pragma once

#include <climits>

#include "../../core/sequence.h"

namespace flash_attn_ext::cuda::sm90 {

// Numbers of 32 or 64 bits, one for each sequence, as words.
struct SequenceNumbers {
  const int32_t* words;
  int step;  // words of a number; 0: there are no numbers, and word 0 is any memory

  SequenceNumbers(const Offsets& offsets, const void* any_memory)
      : words(static_cast<const int32_t*>(offsets ? offsets.data : any_memory)),
        step(!offsets           ? 0
             : offsets.is_int64 ? 2
                                : 1) {}

  // A number beyond 32 bits becomes the nearest number of 32 bits: all totals have less.
  FA_HOST_DEVICE int operator[](int n) const {
    const int low = words[n * step], high = words[n * step + (step > 1)], sign = low >> 31;
    return step < 2 || high == sign ? low : high < 0 ? INT_MIN : INT_MAX;
  }
};

// Of the queries or of the keys.
struct SequenceSide {
  SequenceNumbers offsets, used;
  int total, longest;

  // rows_of_sequence() of core/sequence.h.
  FA_HOST_DEVICE Range rows(int b) const {
    const int begin = clamp(offsets[b], 0, total), end = clamp(offsets[b + 1], begin, total);
    const int most = clamp(end - begin, 0, longest), given = clamp(used[b], 0, most);
    return {begin, begin + (used.step ? given : most)};
  }

 private:
  FA_HOST_DEVICE static int clamp(int x, int least, int most) {
    const int above = x < least ? least : x;
    return above < most ? above : most;
  }
};

struct SequenceRows {
  SequenceSide q, k;
  int lower_right;

  explicit SequenceRows(const AttentionParams& p)
      : q{{p.varlen.cu_seqlens_q, p.q.data},
          {p.varlen.seqused_q, p.q.data},
          static_cast<int>(p.varlen.total_q),
          static_cast<int>(p.sizes.seqlen_q)},
        k{{p.varlen.cu_seqlens_k, p.q.data},
          {p.varlen.seqused_k, p.q.data},
          static_cast<int>(p.varlen.total_k),
          static_cast<int>(p.sizes.seqlen_k)},
        lower_right(p.varlen.lower_right) {}

  // The sizes, the first rows and the diagonal of of_sequence(call, b). Its tensors still begin at row 0.
  FA_HOST_DEVICE AttentionParams sizes_of(AttentionParams call, int b) const {
    const Range rows_q = q.rows(b), rows_k = k.rows(b);
    const bool packed = q.offsets.step > 0;
    call.varlen.first_q = packed ? rows_q.begin : 0;
    call.varlen.first_k = packed ? rows_k.begin : 0;
    call.sizes.seqlen_q = packed ? rows_q.end - rows_q.begin : call.sizes.seqlen_q;
    call.sizes.seqlen_k = packed ? rows_k.end - rows_k.begin : call.sizes.seqlen_k;
    call.band.diagonal += lower_right ? call.sizes.seqlen_k - call.sizes.seqlen_q : 0;
    return call;
  }
};

}  // namespace flash_attn_ext::cuda::sm90
