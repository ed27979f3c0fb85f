// Memory of the backward: what all tasks share, and each thread's scratch. All of it is linear in S_q and
// S_k.

// Enough tasks for a few threads where batch x heads is small; each costs one dQ accumulator.
constexpr int64_t kBackwardTasks = 8;

template <class T>
struct BackwardWorkspace {
  int64_t chunks;
  RowTerms<T> rows;  // [B * H][S_q] each
  T* dq;             // [chunks][B * H][S_q][D]
  T* dk;             // [B * H][S_k][D]     only if query heads share a key head
  T* dv;             // [B * H][S_k][D_v]   likewise
  T* dslopes;        // [B * H][chunks]
  char* scratch;     // one BackwardScratch a thread
};

template <class In, class T>
BackwardWorkspace<T> plan_backward_workspace(Arena& arena, const BackwardParams& p, int threads) {
  const Sizes& z = p.sizes;
  const int64_t heads = z.batch * z.heads;
  const int64_t d = round_up_to_lanes<T>(z.head_dim), d_v = round_up_to_lanes<T>(z.head_dim_v);
  const int64_t block_k = backward_tiling<T>().block_k, key_blocks = (z.seqlen_k + block_k - 1) / block_k;
  const bool shared = z.heads != z.heads_kv;
  Arena scratch(nullptr);
  plan_backward<In, T>(scratch, p);

  BackwardWorkspace<T> w;
  w.chunks = std::min((kBackwardTasks + heads - 1) / heads, key_blocks);
  for (T** term : {&w.rows.delta, &w.rows.max, &w.rows.log_sum}) *term = arena.take<T>(heads * z.seqlen_q);
  w.dq = arena.take<T>(p.dq ? w.chunks * heads * z.seqlen_q * d : 0);
  w.dk = arena.take<T>(p.dk && shared ? heads * z.seqlen_k * d : 0);
  w.dv = arena.take<T>(p.dv && shared ? heads * z.seqlen_k * d_v : 0);
  w.dslopes = arena.take<T>(p.dalibi_slopes ? heads * w.chunks : 0);
  w.scratch = arena.take<char>(static_cast<int64_t>(scratch.used()) * threads);
  return w;
}

template <class In, class T>
BackwardScratch<In, T> thread_scratch(const BackwardParams& p, const BackwardWorkspace<T>& w, int thread) {
  Arena measure(nullptr);
  plan_backward<In, T>(measure, p);
  Arena arena(w.scratch + thread * measure.used());
  return plan_backward<In, T>(arena, p);
}
