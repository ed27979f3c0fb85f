// The checks of the indexer's arguments.
#include <ATen/ops/aminmax.h>
#include <c10/util/Exception.h>

#include <string>

#include "../checks/check_tensors.h"
#include "../checks/checks.h"
#include "indexer.h"

namespace flash_attn_ext::indexer {
namespace {

using c10::SymInt;

void check_dim(const char* name, const at::Tensor& t, int64_t dim, const char* shape) {
  TORCH_CHECK_VALUE(t.dim() == dim, name, ": got shape ", t.sym_sizes(), "; allowed: ", shape);
}

void check_size(const char* name, const at::Tensor& t, int64_t dim, const SymInt& size, const char* of) {
  TORCH_CHECK_VALUE(t.sym_size(dim) == size, name, ": got shape ", t.sym_sizes(), ", with size ",
                    t.sym_size(dim), " in dimension ", dim, "; allowed there: ", size, " (", of, ")");
}

void check_dtype(const char* name, const at::Tensor& t, at::ScalarType wanted, const char* dtype_of) {
  TORCH_CHECK_TYPE(t.scalar_type() == wanted, name, ": got dtype ", name_of(t.scalar_type()),
                   "; allowed: ", dtype_of, ", ", name_of(wanted));
}

void check_is_index(const char* name, const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kInt || t.scalar_type() == at::kLong, name, ": got dtype ",
                   name_of(t.scalar_type()), "; allowed: int32, int64");
}

void check_device(const char* name, const at::Tensor& t, const at::Tensor& q) {
  TORCH_CHECK_TYPE(t.device() == q.device(), name, ": got device ", t.device(), "; allowed: q's, ",
                   q.device());
}

at::Tensor as_int64(const at::Tensor& t) { return t.to(at::kLong).contiguous(); }

}  // namespace

void check_inputs(const Inputs& in) {
  const at::ScalarType dtype = in.q.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf,
      "q: got dtype ", name_of(dtype), "; allowed: float32, float64, bfloat16, float16");
  check_device("k", in.k, in.q);
  check_device("weights", in.weights, in.q);
  check_dtype("k", in.k, dtype, "q's");
  TORCH_CHECK_TYPE(in.weights.scalar_type() == dtype || in.weights.scalar_type() == in.accumulator(),
                   "weights: got dtype ", name_of(in.weights.scalar_type()), "; allowed: q's, ",
                   name_of(dtype), ", or the accumulator's, ", name_of(in.accumulator()));
  check_dim("q", in.q, 4, "(batch, index heads, seqlen_q, index head dim)");
  check_dim("k", in.k, 3,
            in.block_table ? "(pages, page size, index head dim)" : "(batch, seqlen_k, index head dim)");
  check_dim("weights", in.weights, 3, "(batch, seqlen_q, index heads)");
  TORCH_CHECK_VALUE(in.q.sym_size(1) >= 1 && in.q.sym_size(3) >= 1, "q: got shape ", in.q.sym_sizes(),
                    "; allowed: at least one index head and one column");
  const SymInt batch = in.q.sym_size(0);
  if (!in.block_table) check_size("k", in.k, 0, batch, "q's batch");
  check_size("k", in.k, 2, in.q.sym_size(3), "q's index head dim");
  check_size("weights", in.weights, 0, batch, "q's batch");
  check_size("weights", in.weights, 1, in.q.sym_size(2), "q's seqlen_q");
  check_size("weights", in.weights, 2, in.q.sym_size(1), "q's index heads");
  if (in.block_table) {
    check_device("block_table", *in.block_table, in.q);
    check_is_index("block_table", *in.block_table);
    check_dim("block_table", *in.block_table, 2, "(batch, pages of a sequence)");
    check_size("block_table", *in.block_table, 0, batch, "q's batch");
    TORCH_CHECK_VALUE(in.cache_seqlens, "cache_seqlens: got None with block_table; allowed: (batch)");
    TORCH_CHECK_VALUE(in.k.sym_size(1) >= 1, "k: got pages of 0 rows; allowed: at least one row");
  }
  if (in.cache_seqlens) {
    check_device("cache_seqlens", *in.cache_seqlens, in.q);
    check_is_index("cache_seqlens", *in.cache_seqlens);
    check_dim("cache_seqlens", *in.cache_seqlens, 1, "(batch)");
    check_size("cache_seqlens", *in.cache_seqlens, 0, batch, "q's batch");
  }
  if (in.key_mask) {
    check_device("key_mask", *in.key_mask, in.q);
    TORCH_CHECK_TYPE(in.key_mask->scalar_type() == at::kBool, "key_mask: got dtype ",
                     name_of(in.key_mask->scalar_type()), "; allowed: bool, true for a visible key");
    check_dim("key_mask", *in.key_mask, 2, "(batch, seqlen_k)");
    check_size("key_mask", *in.key_mask, 0, batch, "q's batch");
    check_size("key_mask", *in.key_mask, 1, in.seqlen_k(), "the keys");
  }
  constexpr int64_t kMost = int64_t{1} << 31;  // indices are int32
  TORCH_CHECK_VALUE(in.seqlen_k() < kMost, "k: got ", in.seqlen_k(), " keys; allowed: below 2^31");
}

void check_chosen(const Inputs& in, const at::Tensor& indices) {
  check_device("indices", indices, in.q);
  check_is_index("indices", indices);
  check_dim("indices", indices, 4, "(batch, 1, seqlen_q, topk)");
  check_size("indices", indices, 0, in.q.sym_size(0), "q's batch");
  check_size("indices", indices, 1, 1, "all index heads choose the same keys");
  check_size("indices", indices, 2, in.q.sym_size(2), "q's seqlen_q");
}

void check_rows(const char* name, const at::Tensor& t, const Inputs& in,
                const std::optional<SymInt>& columns) {
  check_device(name, t, in.q);
  check_dtype(name, t, in.accumulator(), "the accumulator's");
  check_dim(name, t, columns ? 4 : 2, columns ? "(batch, 1, seqlen_q, topk)" : "(batch, seqlen_q)");
  check_size(name, t, 0, in.q.sym_size(0), "q's batch");
  check_size(name, t, columns ? 2 : 1, in.q.sym_size(2), "q's seqlen_q");
  if (columns) check_size(name, t, 3, *columns, "the slots of indices");
}

void check_main(const Inputs& in, const MainInputs& main) {
  for (const auto& [name, t] :
       {std::pair<const char*, const at::Tensor&>{"query", main.query}, {"key", main.key}, {"lse", main.lse}})
    check_device(name, t, in.q);
  check_dtype("query", main.query, in.q.scalar_type(), "q_index's");
  check_dtype("key", main.key, in.q.scalar_type(), "q_index's");
  check_dtype("lse", main.lse, in.accumulator(), "the accumulator's");
  check_dim("query", main.query, 4, "(batch, heads, seqlen_q, head dim)");
  check_dim("key", main.key, 4, "(batch, key heads, seqlen_k, head dim)");
  check_dim("lse", main.lse, 3, "(batch, heads, seqlen_q)");
  const SymInt heads = main.query.sym_size(1), heads_kv = main.key.sym_size(1);
  TORCH_CHECK_VALUE(heads >= 1 && main.query.sym_size(3) >= 1, "query: got shape ", main.query.sym_sizes(),
                    "; allowed: at least one head and one column");
  TORCH_CHECK_VALUE(heads_kv >= 1 && heads % heads_kv == 0, "key: got ", heads_kv, " heads for ", heads,
                    " heads of query; allowed: a divisor");
  check_size("query", main.query, 0, in.q.sym_size(0), "q_index's batch");
  check_size("query", main.query, 2, in.q.sym_size(2), "q_index's seqlen_q");
  check_size("key", main.key, 0, in.q.sym_size(0), "q_index's batch");
  check_size("key", main.key, 2, in.k.sym_size(1), "k_index's seqlen_k");
  check_size("key", main.key, 3, main.query.sym_size(3), "query's head dim");
  check_size("lse", main.lse, 0, in.q.sym_size(0), "q_index's batch");
  check_size("lse", main.lse, 1, heads, "query's heads");
  check_size("lse", main.lse, 2, in.q.sym_size(2), "q_index's seqlen_q");
}

void check_loss(const Inputs& in, const MainInputs& main, const OptionalTensor& indices) {
  check_inputs(in);
  check_main(in, main);
  if (indices) check_chosen(in, *indices);
}

void check_loss_gradients(const Inputs& in, const LossGradients& grad) {
  check_rows("grad_loss", grad.grad_loss, in);
  check_rows("index_lse", grad.index_lse, in);
  check_rows("mass", grad.mass, in);
}

void check_memory(const Inputs& in) {
  check_storage("q", in.q);
  check_storage("k", in.k);
  check_storage("weights", in.weights);
  if (in.key_mask) check_storage("key_mask", *in.key_mask);
  if (in.cache_seqlens) check_storage("cache_seqlens", *in.cache_seqlens);
  if (in.block_table) check_storage("block_table", *in.block_table);
}

void check_memory(const MainInputs& main, const OptionalTensor& indices) {
  check_storage("query", main.query);
  check_storage("key", main.key);
  check_storage("lse", main.lse);
  if (indices) check_storage("indices", *indices);
}

void check_lengths_and_pages(const Inputs& in) {
  if (!in.cache_seqlens) return;
  const at::Tensor lengths = as_int64(*in.cache_seqlens);
  const int64_t* used = lengths.const_data_ptr<int64_t>();
  const int64_t batch = lengths.numel(), rows = in.k.size(1);
  const int64_t blocks = in.block_table ? in.block_table->size(1) : 1;
  at::Tensor table;
  if (in.block_table) table = as_int64(*in.block_table);
  for (int64_t b = 0; b < batch; ++b) {
    TORCH_CHECK_VALUE(used[b] >= 0 && used[b] <= rows * blocks, "cache_seqlens: got ", used[b], " at ", b,
                      "; allowed: 0 to ", rows * blocks);
    for (int64_t n = 0; in.block_table && n * rows < used[b]; ++n) {
      const int64_t page = table.const_data_ptr<int64_t>()[b * blocks + n];
      TORCH_CHECK_VALUE(page >= 0 && page < in.k.size(0), "block_table: got ", page, " at ", b,
                        "; allowed: 0 to ", in.k.size(0) - 1);
    }
  }
}

void check_key_numbers(const Inputs& in, const at::Tensor& indices) {
  if (indices.numel() == 0) return;
  const auto [least, most] = at::aminmax(indices);
  const int64_t low = least.item<int64_t>(), high = most.item<int64_t>(), keys = in.k.size(1);
  TORCH_CHECK_VALUE(low >= -1 && high < keys, "indices: got ", low < -1 ? low : high, "; allowed: -1 to ",
                    keys - 1, ", -1 for none");
}

}  // namespace flash_attn_ext::indexer
