#include "widen_float8.h"

#include "target_region.h"

#if defined(__x86_64__)
#include <immintrin.h>

FA_TARGET_BEGIN("avx512f,avx512bw,avx512vbmi")
namespace flash_attn_ext::cpu {
namespace {

// The values of 64 codes: 32 in `first`, 32 in `second`. 6 instructions, without loads. A lookup of 16-bit values takes
// 7 instructions for 32 codes.
struct Widening {
  // Unpacking takes the first and the second half of each 16 bytes, so this order moves the first 32 elements to the
  // first halves.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(-128);
  __m512i low_0, low_1, high_0, high_1;

  explicit Widening(const Float8Bytes& bytes)
      : low_0(_mm512_loadu_si512(bytes.low)),
        low_1(_mm512_loadu_si512(bytes.low + 64)),
        high_0(_mm512_loadu_si512(bytes.high)),
        high_1(_mm512_loadu_si512(bytes.high + 64)) {}

  FA_INLINE void widen(__m512i in_order, __m512i& first, __m512i& second) const {
    constexpr int kHighOrSign = 0xf8;  // a | (b & c)
    const __m512i codes = _mm512_permutexvar_epi64(order, in_order);
    const __m512i low = _mm512_permutex2var_epi8(low_0, codes, low_1);
    const __m512i high =
        _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high_0, codes, high_1), codes, sign, kHighOrSign);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }
};

void widen_rows(const Float8Bytes& bytes, const uint8_t* from, int64_t stride, int64_t rows, int64_t cols,
                uint16_t* to, int64_t ld) {
  const Widening widening(bytes);
  __m512i first, second;
  for (int64_t r = 0; r < rows; ++r, from += stride, to += ld) {
    int64_t c = 0;
    for (; c + 64 <= cols; c += 64) {
      widening.widen(_mm512_loadu_si512(from + c), first, second);
      _mm512_storeu_si512(to + c, first);
      _mm512_storeu_si512(to + c + 32, second);
    }
    if (c == cols) continue;
    const __mmask64 some = (__mmask64{1} << (cols - c)) - 1;
    widening.widen(_mm512_maskz_loadu_epi8(some, from + c), first, second);
    _mm512_mask_storeu_epi16(to + c, static_cast<__mmask32>(some), first);
    _mm512_mask_storeu_epi16(to + c + 32, static_cast<__mmask32>(some >> 32), second);
  }
}

}  // namespace
}  // namespace flash_attn_ext::cpu
FA_TARGET_END

namespace flash_attn_ext::cpu {
WidenFloat8Rows* widen_float8_rows() {
  static WidenFloat8Rows* const rows = __builtin_cpu_supports("avx512vbmi") ? widen_rows : nullptr;
  return rows;
}
}  // namespace flash_attn_ext::cpu

#else

namespace flash_attn_ext::cpu {
WidenFloat8Rows* widen_float8_rows() { return nullptr; }
}  // namespace flash_attn_ext::cpu

#endif
