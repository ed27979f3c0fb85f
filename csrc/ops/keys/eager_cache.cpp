#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <torch/csrc/Exceptions.h>

#include "../autograd/autograd_calls.h"
#include "../checks/checks.h"
#include "eager.h"
#include "from_python.h"
#include "on_cpu.h"
#include "ordinary.h"

namespace flash_attn_ext {
namespace {

// The arguments of kvcache_if_ordinary, in order. A member with another type than its object makes the call not ordinary.
struct KvcacheCall {
  at::Tensor q, k_cache, v_cache;
  OptionalTensor k, v, rotary_cos, rotary_sin;
  OptionalTensor cache_batch_idx, cache_leftpad, block_table, alibi_slopes, sink, k_descale, v_descale,
      cu_seqlens_q, k_scales, v_scales, k_zeros, v_zeros;
  PyObject *cache_seqlens, *window_size;
  std::optional<double> scale;
  bool causal, interleaved, return_lse;
  double softcap;
  int64_t num_splits, attention_chunk;
  std::optional<int64_t> max_seqlen_q;
};

bool from_python(PyObject* object, PyObject*& borrowed) {
  borrowed = object;
  return true;
}
using flash_attn_ext::from_python;

template <class... Member>
bool read_all(PyObject* const* objects, Member&... members) {
  return (from_python(*objects++, members) && ...);
}

bool are_dense(PyObject* const* objects, Py_ssize_t count) {
  return std::all_of(objects, objects + count,
                     [](PyObject* object) { return object == Py_None || is_dense_tensor(object); });
}

using flash_attn_ext::needs_derivative;
bool needs_derivative(const OptionalTensor& t) { return t && needs_derivative(*t); }

// Offsets of `batch` sequences with `rows` rows each.
at::Tensor equal_offsets(int64_t batch, int64_t rows) {
  at::Tensor offsets = at::empty({batch + 1}, at::kLong);
  int64_t* data = offsets.mutable_data_ptr<int64_t>();
  for (int64_t b = 0; b <= batch; ++b) data[b] = b * rows;
  return offsets;
}

// The two numbers of a window; -1 is no limit.
bool read_window(PyObject* object, CacheOptions& options) {
  int64_t left = 0, right = 0;
  if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != 2 ||
      !from_python(PyTuple_GET_ITEM(object, 0), left) || !from_python(PyTuple_GET_ITEM(object, 1), right))
    return false;
  if (left != -1) options.window_left = left;
  if (right != -1) options.window_right = right;
  return true;
}

// The lengths of the caches: a tensor, one number, or all rows.
bool read_lengths(PyObject* object, int64_t batch, int64_t rows, at::Tensor& lengths) {
  if (is_dense_tensor(object)) {
    lengths = THPVariable_Unpack(object);
    return lengths.dim() == 1 && lengths.size(0) == batch && lengths.is_cpu() &&
           (lengths.scalar_type() == at::kInt || lengths.scalar_type() == at::kLong);
  }
  int64_t length = rows;
  if (object != Py_None && !from_python(object, length)) return false;
  if (length < 0 || length > rows) return false;
  lengths = at::full({batch}, length, at::kLong);
  return true;
}

// Factors of 8-bit rows, (H_k), (caches, H_k) or three dimensions, as the operator needs them.
bool expand_scale(const at::Tensor& cache, OptionalTensor& scale) {
  if (!scale) return true;
  if (scale->dim() == 2) scale = scale->unsqueeze(1);
  if (scale->dim() < 1 || scale->dim() > 3 || scale->scalar_type() != at::kFloat) return false;
  for (int64_t n = 1; n <= scale->dim(); ++n)
    if (scale->size(-n) != 1 && scale->size(-n) != cache.size(3 - n)) return false;
  scale = scale->expand(cache.sizes().slice(0, 3));
  return true;
}

bool has_ordinary_shapes(const KvcacheCall& c) {
  if (!c.q.is_cpu() || c.k_cache.dim() != 4 || c.v_cache.dim() != 4 || c.q.numel() == 0) return false;
  if (c.q.dim() != (c.cu_seqlens_q ? 3 : 4) || (c.cu_seqlens_q && c.cu_seqlens_q->dim() != 1)) return false;
  if (c.block_table && (c.block_table->dim() != 2 || c.cache_batch_idx)) return false;
  if (c.k.has_value() != c.v.has_value() || c.rotary_cos.has_value() != c.rotary_sin.has_value() ||
      (c.rotary_cos && !c.k) || (c.max_seqlen_q && *c.max_seqlen_q < 0))
    return false;
  if (c.sink && c.sink->scalar_type() != c.q.scalar_type() && c.sink->scalar_type() != at::kFloat)
    return false;
  return true;
}

// A call that needs derivatives is not ordinary. The dispatcher's autograd raises an error, at the latest in the backward.
bool needs_derivatives(const KvcacheCall& c) {
  const auto any = [](const auto&... tensors) { return (needs_derivative(tensors) || ...); };
  return any(c.q, c.k_cache, c.v_cache, c.k, c.v, c.alibi_slopes, c.sink, c.rotary_cos, c.rotary_sin,
             c.k_descale, c.v_descale, c.k_scales, c.v_scales, c.k_zeros, c.v_zeros);
}

bool has_ordinary_new_rows(const KvcacheCall& c, int64_t batch) {
  if (!c.k) return true;
  return c.k->dim() == 4 && c.v->dim() == 4 && c.k->size(0) == batch && c.k->numel() != 0 &&
         c.k->size(2) == c.k_cache.size(2) && c.k->size(3) == columns_of(c.k_cache).expect_int() &&
         c.v->sizes().slice(0, 3) == c.k->sizes().slice(0, 3);
}

// The operators' arguments for the call. False: the call is not ordinary.
bool to_operators(KvcacheCall& c, CacheTensors& t, CacheOptions& options, AppendTensors& append) {
  if (!has_ordinary_shapes(c) || needs_derivatives(c)) return false;
  const int64_t batch = c.cu_seqlens_q ? c.cu_seqlens_q->size(0) - 1 : c.q.size(0);
  const int64_t rows = c.k_cache.size(1) * (c.block_table ? c.block_table->size(1) : 1);
  if (batch < 0 || !has_ordinary_new_rows(c, batch) || !read_window(c.window_size, options) ||
      !read_lengths(c.cache_seqlens, batch, rows, t.seqused_k) || !expand_scale(c.k_cache, c.k_descale) ||
      !expand_scale(c.v_cache, c.v_descale))
    return false;
  t.query = c.cu_seqlens_q ? c.q : c.q.reshape({batch * c.q.size(1), c.q.size(2), c.q.size(3)});
  t.cu_seqlens_q = c.cu_seqlens_q ? *c.cu_seqlens_q : equal_offsets(batch, c.q.size(1));
  t.key = c.k_cache;
  t.value = c.v_cache;
  t.alibi_slopes = c.alibi_slopes;
  t.sink = c.sink;
  t.batch_idx = c.cache_batch_idx;
  t.leftpad = c.cache_leftpad;
  t.block_table = c.block_table;
  t.key_scale = c.k_descale;
  t.value_scale = c.v_descale;
  t.key_group_scale = c.k_scales;
  t.value_group_scale = c.v_scales;
  t.key_group_zero = c.k_zeros;
  t.value_group_zero = c.v_zeros;
  options.scale = c.scale;
  options.causal = c.causal;
  options.lower_right = true;
  options.softcap = c.softcap;
  options.num_splits = c.num_splits;
  options.attention_chunk = c.attention_chunk;
  if (!c.cu_seqlens_q)
    options.max_seqlen_q = c.q.size(1);
  else if (c.max_seqlen_q)
    options.max_seqlen_q = *c.max_seqlen_q;
  if (!c.k) return true;
  append.query = t.query;
  append.cu_seqlens_q = t.cu_seqlens_q;
  append.key = c.k->flatten(0, 1);
  append.value = c.v->flatten(0, 1);
  append.cu_seqlens_k_new = equal_offsets(batch, c.k->size(1));
  append.key_cache = c.k_cache;
  append.value_cache = c.v_cache;
  append.cache_seqlens = t.seqused_k;
  append.rotary_cos = c.rotary_cos;
  append.rotary_sin = c.rotary_sin;
  append.cache_batch_idx = c.cache_batch_idx;
  append.cache_leftpad = c.cache_leftpad;
  append.block_table = c.block_table;
  append.key_scale = c.k_descale;
  append.value_scale = c.v_descale;
  append.key_group_scale = c.k_scales;
  append.value_group_scale = c.v_scales;
  append.key_group_zero = c.k_zeros;
  append.value_group_zero = c.v_zeros;
  return true;
}

// Appends, if there are new rows, and attends. All checks run before a row is written, as in _cache.py.
AttentionResult append_and_attend(const KvcacheCall& c, CacheTensors& t, const CacheOptions& options,
                                  const AppendTensors& append) {
  if (c.k) {
    AttentionCache::check(t, options);
    check_contents(t, options);
    AppendOptions how;
    how.interleaved = c.interleaved;
    how.advance_query_positions = c.causal || options.window_left || options.window_right;
    AppendResult written = call<AppendToCache>(append, how);
    t.seqused_k = std::move(written.lengths);
    if (c.rotary_cos) t.query = std::move(written.query);
  }
  return call_with_derivatives<AttentionCache>(t, options);
}

PyObject* kvcache_if_ordinary(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kTensors = 19, kArguments = kTensors + 10;
  TORCH_CHECK_TYPE(count == kArguments, "kvcache_if_ordinary: got ", count,
                   " arguments; allowed: ", kArguments);
  KvcacheCall c;
  if (!are_dense(arguments, kTensors) || is_observed() || has_dispatch_mode() ||
      !read_all(arguments, c.q, c.k_cache, c.v_cache, c.k, c.v, c.rotary_cos, c.rotary_sin, c.cache_batch_idx,
                c.cache_leftpad, c.block_table, c.alibi_slopes, c.sink, c.k_descale, c.v_descale,
                c.cu_seqlens_q, c.k_scales, c.v_scales, c.k_zeros, c.v_zeros, c.cache_seqlens, c.scale,
                c.causal, c.window_size, c.softcap, c.interleaved, c.num_splits, c.return_lse, c.max_seqlen_q,
                c.attention_chunk))
    Py_RETURN_NONE;
  CacheTensors tensors;
  CacheOptions options;
  AppendTensors append;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    if (!to_operators(c, tensors, options, append)) Py_RETURN_NONE;
  }
  AttentionResult result;
  {
    pybind11::gil_scoped_release without_gil;
    result = append_and_attend(c, tensors, options, append);
    if (!c.cu_seqlens_q) {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      const int64_t batch = c.q.size(0), rows = c.q.size(1);
      result.out = result.out.view({batch, rows, c.q.size(2), result.out.size(2)});
      if (c.return_lse) result.lse = result.lse.view({c.q.size(2), batch, rows}).transpose(0, 1);
    }
  }
  if (!c.return_lse) return THPVariable_Wrap(std::move(result.out));
  PyObject* pair = PyTuple_New(2);
  if (!pair) return nullptr;
  PyTuple_SET_ITEM(pair, 0, THPVariable_Wrap(std::move(result.out)));
  PyTuple_SET_ITEM(pair, 1, THPVariable_Wrap(std::move(result.lse)));
  return pair;
  END_HANDLE_TH_ERRORS
}

// Whether a call of an operator's tensors on CPU may skip the dispatcher.
template <class Tensors>
bool may_skip_dispatcher(PyObject* const* objects, Tensors& tensors) {
  if (!are_dense(objects, kMembers<Tensors>) || is_observed() || has_dispatch_mode() ||
      !all_from_python(objects, tensors))
    return false;
  bool plain = true;
  for_each_present_tensor(tensors, [&](const TensorRule&, const at::Tensor& t) {
    plain &= has_plain_elements(t) && !needs_derivative(t);
  });
  return plain;
}

PyObject* write_cache_if_ordinary(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kTensors = kMembers<AppendTensors>;
  TORCH_CHECK_TYPE(count == kTensors, "write_cache_if_ordinary: got ", count,
                   " arguments; allowed: ", kTensors);
  AppendTensors tensors;
  if (!may_skip_dispatcher(arguments, tensors)) Py_RETURN_NONE;
  {
    pybind11::gil_scoped_release without_gil;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    write_cache_on_cpu(tensors, AppendOptions{});
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// Whether kernels may write the result to `out` directly.
bool may_be_written(const at::Tensor& out, const CacheTensors& in) {
  if (in.query.dim() != 3 || in.value.dim() != 4 || !has_plain_elements(out) || needs_derivative(out) ||
      out.scalar_type() != in.query.scalar_type() || !out.is_contiguous() ||
      !out.sizes().equals({in.query.size(0), in.query.size(1), columns_of(in.value).expect_int()}) ||
      (out.is_inference() && !c10::InferenceMode::is_enabled()))
    return false;
  bool shared = false;
  for_each_present_tensor(in, [&](const TensorRule&, const at::Tensor& t) { shared |= out.is_alias_of(t); });
  return !shared;
}

PyObject* read_cache_if_ordinary(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kTensors = kMembers<CacheTensors>, kOptions = kMembers<CacheOptions>;
  TORCH_CHECK_TYPE(count == kTensors + 2, "read_cache_if_ordinary: got ", count,
                   " arguments; allowed: ", kTensors + 2);
  CacheTensors tensors;
  CacheOptions options;
  PyObject* option_objects[kOptions];
  objects_by_name<CacheOptions>(arguments[kTensors + 1], option_objects);
  if (!is_dense_tensor(arguments[0]) || !may_skip_dispatcher(arguments + 1, tensors) ||
      !all_from_python(option_objects, options))
    Py_RETURN_NONE;
  const at::Tensor& out = THPVariable_Unpack(arguments[0]);
  if (!may_be_written(out, tensors)) Py_RETURN_NONE;
  {
    pybind11::gil_scoped_release without_gil;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    read_cache_on_cpu(tensors, options, out);
  }
  if (!out.is_inference()) out.unsafeGetTensorImpl()->bump_version();
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef kKvcacheIfOrdinary = {"kvcache_if_ordinary", reinterpret_cast<PyCFunction>(kvcache_if_ordinary),
                                  METH_FASTCALL, nullptr};
PyMethodDef kWriteCacheIfOrdinary = {"write_cache_if_ordinary",
                                     reinterpret_cast<PyCFunction>(write_cache_if_ordinary), METH_FASTCALL,
                                     nullptr};
PyMethodDef kReadCacheIfOrdinary = {
    "read_cache_if_ordinary", reinterpret_cast<PyCFunction>(read_cache_if_ordinary), METH_FASTCALL, nullptr};

}  // namespace flash_attn_ext
