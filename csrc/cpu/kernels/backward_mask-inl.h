// Gradient of a float mask, in the mask's own broadcast shape: dmask = sum of dS over what the mask was
// broadcast.
//
// A pass of its own (two more products a tile): it is parallel over the mask's elements, each task summing
// the batches, heads and rows that share its tile in a fixed order, so that nothing of size S_q x S_k is ever
// stored that the mask itself is not.

template <class Out, class T>
void store_mask_tile(const MaskGrad& g, int64_t mb, int64_t mh, int64_t i0, int64_t j0, int64_t rows,
                     int64_t cols, const T* tile, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) {
    Out* out = static_cast<Out*>(g.data) + ((mb * g.heads + mh) * g.rows + i0 + r) * g.cols + j0;
    for (int64_t c = 0; c < cols; ++c) {
      if constexpr (std::is_arithmetic_v<Out>) {
        out[c] = static_cast<Out>(tile[r * ld + c]);
      } else {
        out[c].bits = from_float(splat(static_cast<float>(tile[r * ld + c])), Out{})[0];
      }
    }
  }
}

// Adds dS of one score tile to the mask tile; a mask that is broadcast along rows or columns takes their sum.
template <class T>
void add_to_mask_tile(const MaskGrad& g, const TileFrame& f, const T* dscores, T* tile, int64_t tile_ld) {
  for (int64_t r = 0; r < f.queries; ++r)
    for (int64_t c = 0; c < f.keys; ++c)
      tile[(g.rows == 1 ? 0 : r) * tile_ld + (g.cols == 1 ? 0 : c)] += dscores[r * f.ld + c];
}

template <class In, class T>
void backward_mask(const BackwardParams& p, const BackwardWorkspace<T>& w, const Parallel& parallel) {
  const auto [block_q, block_k] = backward_tiling<T>();
  const Sizes& z = p.sizes;
  const MaskGrad& g = p.dmask;
  const int64_t row_blocks = (g.rows + block_q - 1) / block_q, col_blocks = (g.cols + block_k - 1) / block_k;

  for_each_task(
      parallel, g.batch * g.heads * row_blocks * col_blocks,
      [&, block_q = block_q, block_k = block_k](int64_t task, int thread) {
        BackwardScratch<In, T> s = thread_scratch<In, T>(p, w, thread);
        const int64_t mj = task % col_blocks * block_k, mi = task / col_blocks % row_blocks * block_q;
        const int64_t mh = task / (col_blocks * row_blocks) % g.heads,
                      mb = task / (col_blocks * row_blocks * g.heads);
        std::fill(s.dmask, s.dmask + block_q * block_k, T(0));

        // What shares this mask tile: one block where the mask has the dimension, everything where it is
        // broadcast.
        const Range batches = g.batch == 1 ? Range{0, z.batch} : Range{mb, mb + 1};
        const Range heads = g.heads == 1 ? Range{0, z.heads} : Range{mh, mh + 1};
        const Range queries =
            g.rows == 1 ? Range{0, z.seqlen_q} : Range{mi, std::min(mi + block_q, z.seqlen_q)};
        const Range keys = g.cols == 1 ? Range{0, z.seqlen_k} : Range{mj, std::min(mj + block_k, z.seqlen_k)};
        for (int64_t b = batches.begin; b < batches.end; ++b)
          for (int64_t h = heads.begin; h < heads.end; ++h)
            for (int64_t j0 = keys.begin; j0 < keys.end; j0 += block_k) {
              const int64_t count = std::min(block_k, keys.end - j0);
              const Range seen = visible_queries(p.band, j0, j0 + count, queries.end);
              if (std::max(seen.begin, queries.begin) >= seen.end) continue;
              s.products.load_keys(p, b, z.kv_head(h), j0, count);
              const RowTerms<T> rows = w.rows.of_head(z, b, h);
              for (int64_t i0 = queries.begin; i0 < queries.end; i0 += block_q) {
                const TileFrame f{
                    b,    h, i0, j0, std::min(block_q, queries.end - i0), count, round_up_to_lanes<T>(count),
                    false};
                if (recompute_tile<In, T>(p, s, f, rows).empty) continue;
                add_to_mask_tile<T>(g, f, s.dscores, s.dmask, block_k);
              }
            }

        const int64_t rows = std::min(block_q, g.rows - mi), cols = std::min(block_k, g.cols - mj);
        switch (p.mask.dtype) {
          case DType::kFloat32:
            return store_mask_tile<float, T>(g, mb, mh, mi, mj, rows, cols, s.dmask, block_k);
          case DType::kFloat64:
            return store_mask_tile<double, T>(g, mb, mh, mi, mj, rows, cols, s.dmask, block_k);
          case DType::kBFloat16:
            return store_mask_tile<BFloat16, T>(g, mb, mh, mi, mj, rows, cols, s.dmask, block_k);
          case DType::kFloat16:
            return store_mask_tile<Float16, T>(g, mb, mh, mi, mj, rows, cols, s.dmask, block_k);
          case DType::kBool: return;  // has no gradient: checked in ops/checks.cpp
        }
      });
}
