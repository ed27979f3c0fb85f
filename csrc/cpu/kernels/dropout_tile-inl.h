// Dropout's keep factors on one tile, from the Philox words of core/philox.h, a vector of calls at a time.

// 64-bit lanes that hold 32-bit words: what a 32 x 32 -> 64 bit multiplication wants.
using Words = VecBits<double>;
constexpr int kCalls = kLanes<double>;

// The full products of the lanes' low halves.
FA_INLINE Words multiply_low_halves(Words a, Words b) {
#if defined(FA_MUL_EPU32)
  return (Words)FA_MUL_EPU32(a, b);
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// philox4x32() of core/philox.h with a vector of counters; the words are in the low halves, the high ones are
// 0.
FA_INLINE void philox_words(PhiloxKey key, Words c0, Words c1, uint32_t head_index, Words (&out)[4]) {
  constexpr uint64_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
  Words c2 = Words{} + head_index, c3 = Words{} + key.counter3;
  uint32_t k0 = key.k0, k1 = key.k1;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Words p0 = multiply_low_halves(c0, Words{} + kMul0), p1 = multiply_low_halves(c2, Words{} + kMul1);
    c0 = (p1 >> 32) ^ c1 ^ uint64_t{k0};
    c2 = (p0 >> 32) ^ c3 ^ uint64_t{k1};
    c1 = p1;  // the multiplication and the final mask ignore what stands in the high halves
    c3 = p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  const Words* const words[] = {&c0, &c1, &c2, &c3};
#pragma GCC unroll 4
  for (int w = 0; w < 4; ++w) out[w] = *words[w] & 0xffffffffu;
}

// Fills dst[row][lane] with 1 / (1 - p) where the element is kept and 0 where it is dropped.
template <class T>
inline void load_dropout_tile(const AttentionParams& p, const TileFrame& f, T* dst) {
  const PhiloxKey key = philox_key(p.dropout.rng_state[0], p.dropout.rng_state[1]);
  const auto head_index = static_cast<uint32_t>(f.b * p.sizes.heads + f.h);
  const T keep = static_cast<T>(p.dropout.keep_scale);
  const int64_t i_stride = f.lanes_are_queries ? 1 : f.ld, j_stride = f.lanes_are_queries ? f.ld : 1;
  // One vector of calls holds the rows t, t + 1, ... of a group of 16 rows, and the same + 8, at two columns.
  for (int64_t group = 0; group < f.queries; group += 16)
    for (int64_t j = 0; j < f.keys; j += 2)
      for (int t = 0; t < 8; t += kCalls) {
        const Words row = (Words)iota<double>() + static_cast<uint64_t>((f.i0 + group) / 2 + t);
        Words words[4];
        philox_words(key, Words{} + static_cast<uint64_t>((f.j0 + j) >> 1), row, head_index, words);
#pragma GCC unroll 4
        for (int w = 0; w < 4; ++w) {
          const Words kept = (Words)(words[w] >= p.dropout.threshold);
          const int64_t i = group + (w >> 1) * 8 + t, col = j + (w & 1);
          T* out = dst + i * i_stride + col * j_stride;
          const int64_t n = std::min<int64_t>(std::min(kCalls, 8), f.queries - i);
          if (col >= f.keys) continue;
          for (int c = 0; c < n; ++c) out[c * i_stride] = kept[c] ? keep : T(0);
        }
      }
}
