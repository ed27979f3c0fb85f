#include "run_case.h"

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "buffers.h"
#include "core/arena.h"
#include "cpu/why_not.h"

namespace test {
namespace {

using namespace flash_attn_ext;

// Allowed errors, relative to the largest value of the tensor, at least to 1. They are the rounding of the accumulator,
// and half an ulp of the 16-bit types with some margin. Twice as much if P and dS are rounded to bfloat16 before the
// products.
double tolerance(DType dtype, const std::string& isa) {
  switch (dtype) {
    case DType::kFloat64: return 1e-13;
    case DType::kBFloat16:
      return (isa == "avx512_bf16" || isa == "amx" || isa == "neon_bf16" ? 2.2 : 1.1) / 256;
    case DType::kFloat16: return 1.1 / 2048;
    default: return isa == "generic" ? 8e-6 : 4e-6;  // generic: without FMA, products are rounded, too
  }
}

Band band_of(const Case& c) {
  Band band;
  if (c.lower_right) band.diagonal = c.sizes.seqlen_k - c.sizes.seqlen_q;
  if (c.left >= 0) band.left = c.left;
  if (c.right >= 0) band.right = c.right;
  if (c.causal) band.right = 0;
  return band;
}

void run_on_std_threads(int threads, void (*worker)(void* context, int thread), void* context) {
  std::vector<std::thread> running;
  for (int n = 1; n < threads; ++n) running.emplace_back(worker, context, n);
  worker(context, 0);
  for (std::thread& thread : running) thread.join();
}

// The kernels' view of a tensor of shape `s`, (B, heads, S, columns): packed along S if the case is packed.
Shape shape_of(const Case& c, int side, const Shape& s) {
  if (!c.packing || count(s) == 0) return s;
  if (side == kKeys && c.is_cache()) return {s[0] * c.pages(), s[1], c.page_rows(), s[3]};
  return {1, s[1], c.first_row(c.sizes.batch, side), s[3]};
}

// Calls body(padded index, packed index) for each row in use.
template <class Body>
void for_each_packed_row(const Case& c, int side, const Shape& s, const Body& body) {
  const Shape to = shape_of(c, side, s);
  for (int64_t b = 0; b < s[0]; ++b)
    for (int64_t h = 0; h < s[1]; ++h)
      for (int64_t i = 0; i < c.length(b, side); ++i) {
        if (side == kKeys && c.is_cache())
          body(at(s, b, h, i, 0), at(to, c.page_of(b, i / c.page_rows()), h, i % c.page_rows(), 0));
        else
          body(at(s, b, h, i, 0), at(to, 0, h, c.first_row(b, side) + i, 0));
      }
}

// Rows that are not in use are NaN.
std::vector<double> packed(const Case& c, int side, const Shape& s, const std::vector<double>& padded) {
  if (!c.packing || padded.empty()) return padded;
  std::vector<double> values(count(shape_of(c, side, s)), std::nan(""));
  for_each_packed_row(c, side, s, [&](int64_t from, int64_t to) {
    std::copy_n(padded.begin() + from, s[3], values.begin() + to);
  });
  return values;
}

std::vector<double> padded(const Case& c, int side, const Shape& s, const std::vector<double>& packed) {
  if (!c.packing || packed.empty()) return packed;
  std::vector<double> values(count(s), 0.0);
  for_each_packed_row(c, side, s, [&](int64_t to, int64_t from) {
    std::copy_n(packed.begin() + from, s[3], values.begin() + to);
  });
  return values;
}

// A mask is packed along its rows, or not packed.
Shape mask_shape_of(const Case& c) {
  return c.packing && c.packing->mask_by_row ? shape_of(c, kQueries, c.mask_shape()) : c.mask_shape();
}

std::vector<double> packed_mask(const Case& c, const std::vector<double>& mask) {
  return c.packing && c.packing->mask_by_row ? packed(c, kQueries, c.mask_shape(), mask) : mask;
}

// Row numbers as the kernels read them, without a spare byte.
class OffsetsBuffer {
 public:
  OffsetsBuffer(bool is_int64, const std::vector<int64_t>& values)
      : offsets_{nullptr, is_int64}, buffer_(values.size() * (is_int64 ? 8 : 4), 64) {
    for (size_t n = 0; n < values.size(); ++n) {
      if (is_int64)
        reinterpret_cast<int64_t*>(buffer_.data())[n] = values[n];
      else
        reinterpret_cast<int32_t*>(buffer_.data())[n] = static_cast<int32_t>(values[n]);
    }
    if (!values.empty()) offsets_.data = buffer_.data();
  }
  Offsets view() const { return offsets_; }

 private:
  Offsets offsets_;
  Buffer buffer_;
};

struct PackingBuffers {
  explicit PackingBuffers(const Case& c)
      : cu_seqlens_q(c.packing && c.packing->int64_offsets, offsets(c, kQueries)),
        cu_seqlens_k(c.packing && c.packing->int64_offsets, offsets(c, kKeys)),
        seqused_q(c.packing && c.packing->int64_offsets, used(c, kQueries)),
        seqused_k(c.packing && c.packing->int64_offsets, used(c, kKeys)),
        pages(c.packing && c.packing->int64_offsets, numbers_of_pages(c)) {}

  static std::vector<int64_t> offsets(const Case& c, int side) {
    std::vector<int64_t> rows;
    if (c.packing && !c.packing->hostile.empty()) return c.packing->hostile;
    for (int64_t b = 0; c.packing && b <= c.sizes.batch; ++b) rows.push_back(c.first_row(b, side));
    return rows;
  }
  static std::vector<int64_t> used(const Case& c, int side) {
    std::vector<int64_t> lengths;
    if (c.is_cache() && side == kKeys) {
      for (int64_t b = 0; b < c.sizes.batch; ++b) lengths.push_back(c.length(b, side));
    } else if (c.packing) {
      for (const auto& length : c.packing->used) lengths.push_back(length[side]);
    }
    return lengths;
  }
  static std::vector<int64_t> numbers_of_pages(const Case& c) {
    std::vector<int64_t> numbers;
    if (!c.is_cache()) return numbers;
    const std::vector<int64_t>& hostile = c.packing->hostile_pages;
    for (int64_t n = 0; n < c.sizes.batch * c.pages(); ++n)
      numbers.push_back(hostile.empty() ? c.page_of(0, n) : hostile[n % hostile.size()]);
    return numbers;
  }

  void fill(const Case& c, AttentionParams& p) const {
    if (!c.packing) return;
    p.varlen.cu_seqlens_q = cu_seqlens_q.view();
    if (!c.is_cache()) p.varlen.cu_seqlens_k = cu_seqlens_k.view();
    p.varlen.seqused_q = seqused_q.view();
    p.varlen.seqused_k = seqused_k.view();
    p.varlen.total_q = c.first_row(c.sizes.batch, kQueries);
    p.varlen.total_k = c.first_row(c.sizes.batch, kKeys);
    p.varlen.lower_right = c.lower_right;
    p.varlen.mask_by_row = c.packing->mask_by_row;
    p.varlen.cache.caches = c.sizes.batch * c.pages();
    if (c.is_cache() && c.packing->page_size == 0) p.varlen.cache.batch_idx = pages.view();
    if (c.is_cache() && c.packing->page_size > 0) {
      p.varlen.cache.pages = {pages.view(), c.pages(), c.page_rows(), c.sizes.batch * c.pages(), 0};
      p.sizes.seqlen_k = c.pages() * c.page_rows();
    }
    p.band.diagonal = 0;
  }

  OffsetsBuffer cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, pages;
};

// A view as in the params: a packed tensor has no stride from sequence to sequence.
Tensor4 view_of(const Case& c, const TensorBuffer& buffer) {
  Tensor4 t = buffer.view();
  if (c.packing) t.stride_b = 0;
  return t;
}

// The tensors that the kernels read.
struct InputBuffers {
  InputBuffers(const Case& c, DType dtype, const Inputs& in)
      : acc(accumulator_of(dtype)),
        q("q", dtype, shape_of(c, kQueries, c.q_shape()), c.layout),
        k("k", dtype, shape_of(c, kKeys, c.k_shape()), c.layout),
        v("v", dtype, shape_of(c, kKeys, c.v_shape()), c.layout),
        dout("dout", dtype,
             c.expanded_dout ? Shape{1, 1, 1, c.sizes.head_dim_v} : shape_of(c, kQueries, c.out_shape()),
             c.layout),
        mask("mask", c.mask ? c.mask->dtype : DType::kBool, mask_shape_of(c),
             c.mask ? c.mask->layout : Layout{}),
        slopes("slopes", acc, c.slopes_shape(), c.layout),
        sink("sink", acc, c.sink_shape(), c.layout),
        dlse("dlse", acc, c.dlse ? shape_of(c, kQueries, c.lse_shape()) : Shape{0, 0, 0, 0}, {}),
        t_q("t_q", dtype, shape_of(c, kQueries, c.q_shape()), c.layout),
        t_k("t_k", dtype, shape_of(c, kKeys, c.k_shape()), {}),
        t_v("t_v", dtype, shape_of(c, kKeys, c.v_shape()), c.layout),
        t_mask("t_mask", c.mask ? c.mask->dtype : DType::kBool,
               in.t_mask.empty() ? Shape{} : mask_shape_of(c), {}),
        t_slopes("t_slopes", acc, c.slopes_shape(), {}),
        t_sink("t_sink", acc, c.sink_shape(), {}),
        packing(c),
        rng_state(new int64_t[2]{in.rng_state[0], in.rng_state[1]}) {
    q.write(packed(c, kQueries, c.q_shape(), in.q));
    k.write(packed(c, kKeys, c.k_shape(), in.k));
    v.write(packed(c, kKeys, c.v_shape(), in.v));
    dout.write(packed(c, kQueries, c.out_shape(), in.dout));
    mask.write(packed_mask(c, in.mask));
    slopes.write(in.slopes);
    sink.write(in.sink);
    dlse.write(packed(c, kQueries, c.lse_shape(), in.dlse));
    t_q.write(packed(c, kQueries, c.q_shape(), in.t_q));
    t_k.write(packed(c, kKeys, c.k_shape(), in.t_k));
    t_v.write(packed(c, kKeys, c.v_shape(), in.t_v));
    t_mask.write(packed_mask(c, in.t_mask));
    t_slopes.write(in.t_slopes);
    t_sink.write(in.t_sink);
  }

  void fill(const Case& c, DType dtype, AttentionParams& p) const {
    p.dtype = dtype;
    p.sizes = c.sizes;
    p.q = view_of(c, q);
    p.k = c.is_cache() ? k.view() : view_of(c, k);
    p.v = c.is_cache() ? v.view() : view_of(c, v);
    p.scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.sizes.head_dim));
    p.softcap = c.softcap;
    p.band = band_of(c);
    p.decode = c.decode;
    if (c.mask) p.mask = mask_params(c, mask);
    p.sink = sink_params(c, sink);
    if (c.slopes != Slopes::kNone)
      p.alibi = {slopes.data(), c.slopes == Slopes::kPerHead ? 0 : slopes.stride(0), slopes.stride(3)};
    if (c.dropout_p > 0) {
      p.dropout.rng_state = rng_state.get();
      p.dropout.threshold = static_cast<uint64_t>(std::llround(std::ldexp(c.dropout_p, 32)));
      p.dropout.keep_scale = c.dropout_p < 1 ? 1 / (1 - c.dropout_p) : 0;
    }
    packing.fill(c, p);
  }

  void fill(const Case& c, Tangents& t) const {
    t.q = view_of(c, t_q);
    t.k = view_of(c, t_k);
    t.v = view_of(c, t_v);
    if (c.mask && c.mask->dtype != DType::kBool) t.mask = mask_params(c, t_mask);
    t.sink = sink_params(c, t_sink);
    if (c.slopes != Slopes::kNone)
      t.alibi = {t_slopes.data(), c.slopes == Slopes::kPerHead ? 0 : t_slopes.stride(0), t_slopes.stride(3)};
  }

  static MaskParams mask_params(const Case& c, const TensorBuffer& mask) {
    auto stride = [&](int dim) { return mask_shape_of(c)[dim] == 1 ? 0 : mask.stride(dim); };
    return {mask.data(), c.mask->dtype, stride(0), stride(1), stride(2), stride(3)};
  }

  static SinkParams sink_params(const Case& c, const TensorBuffer& sink) {
    if (c.sink == Slopes::kNone) return {};
    return {sink.data(), c.sink == Slopes::kPerHead ? 0 : sink.stride(0), sink.stride(3)};
  }

  DType acc;
  TensorBuffer q, k, v, dout, mask, slopes, sink, dlse, t_q, t_k, t_v, t_mask, t_slopes, t_sink;
  PackingBuffers packing;
  std::unique_ptr<int64_t[]> rng_state;
};

// The results of one run. The backward reads out and lse of the reference, so it is tested independently.
struct OutputBuffers {
  OutputBuffers(const Case& c, DType dtype)
      : out("out", dtype, shape_of(c, kQueries, c.out_shape()), c.layout),
        lse("lse", accumulator_of(dtype), shape_of(c, kQueries, c.lse_shape()), {}),
        dq("dq", dtype, shape_of(c, kQueries, c.q_shape()), c.layout),
        dk("dk", dtype, shape_of(c, kKeys, c.k_shape()), c.layout),
        dv("dv", dtype, shape_of(c, kKeys, c.v_shape()), c.layout),
        dmask("dmask", c.mask ? c.mask->dtype : DType::kBool, mask_shape_of(c), {}),
        dslopes("dslopes", accumulator_of(dtype), c.dslopes_shape(), {}),
        dsink("dsink", accumulator_of(dtype), c.dslopes_shape(), {}),
        jvp_out("jvp's out", dtype, shape_of(c, kQueries, c.out_shape()), c.layout),
        jvp_lse("jvp's lse", accumulator_of(dtype), shape_of(c, kQueries, c.lse_shape()), {}),
        t_out("t_out", dtype, shape_of(c, kQueries, c.out_shape()), c.layout),
        t_lse("t_lse", accumulator_of(dtype), shape_of(c, kQueries, c.lse_shape()), {}),
        hq("hq", dtype, shape_of(c, kQueries, c.q_shape()), c.layout),
        hk("hk", dtype, shape_of(c, kKeys, c.k_shape()), c.layout),
        hv("hv", dtype, shape_of(c, kKeys, c.v_shape()), c.layout),
        hmask("hmask", c.mask ? c.mask->dtype : DType::kBool, mask_shape_of(c), {}),
        hslopes("hslopes", accumulator_of(dtype), c.dslopes_shape(), {}),
        hsink("hsink", accumulator_of(dtype), c.dslopes_shape(), {}) {}

  TensorBuffer out, lse, dq, dk, dv, dmask, dslopes, dsink;
  TensorBuffer jvp_out, jvp_lse, t_out, t_lse, hq, hk, hv, hmask, hslopes, hsink;
};

// A workspace that ends at a page without access rights. A red zone of AddressSanitizer is not enough: the guarded arena
// unpoisons its arrays, also past the end of a workspace that is too small.
class Workspace {
 public:
  explicit Workspace(size_t bytes) : mapped_(rounded_up(bytes) + kForbidden) {
    void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    begin_ = static_cast<char*>(memory);
    char* end = begin_ + mapped_ - kForbidden;
    if (mprotect(end, kForbidden, PROT_NONE) != 0) throw std::bad_alloc();
    data_ = end - (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
    ASAN_UNPOISON_MEMORY_REGION(data_, bytes);  // an earlier arena's red zones
    std::memset(data_, 0xff, bytes);            // a read of uninitialised memory returns NaN
  }
  ~Workspace() { munmap(begin_, mapped_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  char* data() const { return data_; }

 private:
  static constexpr size_t kPage = 1 << 16, kForbidden = kPage;
  static size_t rounded_up(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  size_t mapped_;
  char *begin_, *data_;
};

template <class Params>
void run_pass(const cpu::Pass<Params>& pass, const Params& params, const cpu::Parallel& parallel) {
  if (const char* reason = cpu::why_not(params)) throw std::logic_error(reason);
  // The last array of a thread's scratch may be one that a case does not fill: cut more than its last bytes.
  const size_t cut = short_buffer == "workspace" ? 8192 : 0;
  const Workspace workspace(pass.workspace(params, parallel.threads) - cut);
  pass.run(params, workspace.data(), parallel);
}

void run_kernels(const cpu::Kernels& kernels, const Case& c, DType dtype, const InputBuffers& in,
                 const Outputs& expected, int threads, OutputBuffers& result) {
  const cpu::Parallel parallel{threads, run_on_std_threads};

  AttentionParams forward;
  in.fill(c, dtype, forward);
  forward.out = view_of(c, result.out);
  forward.lse = result.lse.data();
  run_pass(kernels.forward, forward, parallel);

  if (c.is_cache()) {  // has no backward, and says so
    BackwardParams refused;
    static_cast<AttentionParams&>(refused) = forward;
    if (!cpu::why_not(refused)) throw std::logic_error("the backward takes a cache");
    return;
  }
  TensorBuffer out("saved out", dtype, shape_of(c, kQueries, c.out_shape()), c.layout),
      lse("saved lse", in.acc, shape_of(c, kQueries, c.lse_shape()), {});
  out.write(packed(c, kQueries, c.out_shape(), expected.out));
  lse.write(packed(c, kQueries, c.lse_shape(), expected.lse));
  BackwardParams backward;
  in.fill(c, dtype, backward);
  backward.out = view_of(c, out);
  backward.lse = lse.data();
  backward.dout = view_of(c, in.dout);
  if (c.expanded_dout) backward.dout = {in.dout.data(), 0, 0, 0};
  backward.dlse = c.dlse ? in.dlse.data() : nullptr;
  if (c.wanted.dq) backward.dq = view_of(c, result.dq);
  if (c.wanted.dk) backward.dk = view_of(c, result.dk);
  if (c.wanted.dv) backward.dv = view_of(c, result.dv);
  const Shape m = mask_shape_of(c);
  if (c.wants_dmask()) backward.dmask = {result.dmask.data(), m[0], m[1], m[2], m[3]};
  if (c.wants_dslopes()) backward.dalibi_slopes = result.dslopes.data();
  if (c.wants_dsink()) backward.dsink = result.dsink.data();
  run_pass(kernels.backward, backward, parallel);

  JvpParams jvp;
  in.fill(c, dtype, jvp);
  in.fill(c, jvp.tangents);
  jvp.out = view_of(c, result.jvp_out);
  jvp.lse = result.jvp_lse.data();
  jvp.t_out = view_of(c, result.t_out);
  jvp.t_lse = result.t_lse.data();
  run_pass(kernels.jvp, jvp, parallel);

  TensorBuffer t_out("saved t_out", dtype, shape_of(c, kQueries, c.out_shape()), c.layout),
      t_lse("saved t_lse", in.acc, shape_of(c, kQueries, c.lse_shape()), {});
  t_out.write(packed(c, kQueries, c.out_shape(), expected.t_out));
  t_lse.write(packed(c, kQueries, c.lse_shape(), expected.t_lse));
  DoubleBackwardParams again;
  static_cast<BackwardParams&>(again) = backward;
  in.fill(c, again.tangents);
  again.t_out = view_of(c, t_out);
  again.t_lse = t_lse.data();
  if (c.wanted.dq) again.dq = view_of(c, result.hq);
  if (c.wanted.dk) again.dk = view_of(c, result.hk);
  if (c.wanted.dv) again.dv = view_of(c, result.hv);
  if (c.wants_dmask()) again.dmask.data = result.hmask.data();
  if (c.wants_dslopes()) again.dalibi_slopes = result.hslopes.data();
  if (c.wants_dsink()) again.dsink = result.hsink.data();
  run_pass(kernels.double_backward, again, parallel);
}

std::string message(const char* format, ...) {
  char text[256];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return text;
}

// Compares one output and appends a message per error to `errors`. `shape` gives the position of the worst element.
void compare(const char* name, const Shape& shape, const std::vector<double>& got,
             const std::vector<double>& expected, double allowed, std::vector<std::string>& errors) {
  double largest = 1, worst = -1;
  size_t where = 0;
  for (const double x : expected)
    if (std::isfinite(x)) largest = std::max(largest, std::fabs(x));
  for (size_t n = 0; n < expected.size(); ++n) {
    double error = std::fabs(got[n] - expected[n]);
    if (std::isnan(expected[n])) error = std::isnan(got[n]) ? 0 : HUGE_VAL;
    if (got[n] == expected[n]) error = 0;  // infinities
    if (std::isnan(error)) error = HUGE_VAL;
    if (error > worst) {
      worst = error;
      where = n;
    }
  }
  if (worst <= allowed * largest) return;
  const size_t d = where % shape[3], s = where / shape[3] % shape[2],
               h = where / shape[3] / shape[2] % shape[1];
  errors.push_back(message("%s[%zu, %zu, %zu, %zu]: got %.9g, expected %.9g; allowed error %.2g", name,
                           where / shape[3] / shape[2] / shape[1], h, s, d, got[where], expected[where],
                           allowed * largest));
}

// Other instruction sets than `generic` run with 3 threads only. Sequences with hostile offsets overlap: threads would race
// for their rows.
std::vector<int> thread_counts(const cpu::Kernels& kernels, const Case& c) {
  if (!c.results_matter()) return {1};
  return std::string(kernels.isa) == "generic" ? std::vector<int>{1, 3} : std::vector<int>{3};
}

}  // namespace

std::vector<std::string> run_case(const cpu::Kernels& kernels, const Case& c, DType dtype, const Inputs& in,
                                  const Outputs& expected) {
  struct Output {
    const char* name;
    bool wanted;
    DType dtype;
    Shape shape;
    int packed_along;  // side of the packing; -1: as it is
    TensorBuffer OutputBuffers::* buffer;
    const std::vector<double>& expected;
    double room = 1;  // factor of the tolerance
  };
  constexpr double kSecondOrder = 8;  // sums of larger terms, which cancel
  // P of 16-bit inputs has a relative error of 2.7e-6 (docs/accuracy.md). These gradients sum it in the accumulator's type.
  const double short_exp = dtype == DType::kBFloat16 || dtype == DType::kFloat16 ? 3 : 1;
  const DType acc = accumulator_of(dtype), mask_dtype = c.mask ? c.mask->dtype : acc;
  const int mask_rows = c.packing && c.packing->mask_by_row ? kQueries : -1;
  const Output outputs[] = {
      {"out", true, dtype, c.out_shape(), kQueries, &OutputBuffers::out, expected.out},
      {"lse", true, acc, c.lse_shape(), kQueries, &OutputBuffers::lse, expected.lse},
      {"dq", c.wanted.dq, dtype, c.q_shape(), kQueries, &OutputBuffers::dq, expected.dq},
      {"dk", c.wanted.dk, dtype, c.k_shape(), kKeys, &OutputBuffers::dk, expected.dk},
      {"dv", c.wanted.dv, dtype, c.v_shape(), kKeys, &OutputBuffers::dv, expected.dv},
      {"dmask", c.wants_dmask(), mask_dtype, c.mask_shape(), mask_rows, &OutputBuffers::dmask, expected.dmask,
       short_exp},
      {"dslopes", c.wants_dslopes(), acc, c.dslopes_shape(), -1, &OutputBuffers::dslopes, expected.dslopes,
       short_exp},
      {"dsink", c.wants_dsink(), acc, c.dslopes_shape(), -1, &OutputBuffers::dsink, expected.dsink,
       short_exp},
      {"jvp's out", true, dtype, c.out_shape(), kQueries, &OutputBuffers::jvp_out, expected.out},
      {"jvp's lse", true, acc, c.lse_shape(), kQueries, &OutputBuffers::jvp_lse, expected.lse},
      {"t_out", true, dtype, c.out_shape(), kQueries, &OutputBuffers::t_out, expected.t_out},
      {"t_lse", true, acc, c.lse_shape(), kQueries, &OutputBuffers::t_lse, expected.t_lse},
      {"hq", c.wanted.dq, dtype, c.q_shape(), kQueries, &OutputBuffers::hq, expected.hq, kSecondOrder},
      {"hk", c.wanted.dk, dtype, c.k_shape(), kKeys, &OutputBuffers::hk, expected.hk, kSecondOrder},
      {"hv", c.wanted.dv, dtype, c.v_shape(), kKeys, &OutputBuffers::hv, expected.hv, kSecondOrder},
      {"hmask", c.wants_dmask(), mask_dtype, c.mask_shape(), mask_rows, &OutputBuffers::hmask, expected.hmask,
       kSecondOrder},
      {"hslopes", c.wants_dslopes(), acc, c.dslopes_shape(), -1, &OutputBuffers::hslopes, expected.hslopes,
       kSecondOrder},
      {"hsink", c.wants_dsink(), acc, c.dslopes_shape(), -1, &OutputBuffers::hsink, expected.hsink,
       kSecondOrder},
  };
  const InputBuffers inputs(c, dtype, in);
  OutputBuffers first(c, dtype);
  std::vector<std::string> errors;
  for (const int threads : thread_counts(kernels, c)) {
    OutputBuffers again(c, dtype);
    OutputBuffers& result = threads == thread_counts(kernels, c)[0] ? first : again;
    run_kernels(kernels, c, dtype, inputs, expected, threads, result);
    for (const Output& o : outputs) {
      TensorBuffer& buffer = result.*o.buffer;
      if (!buffer.open_gaps()) errors.push_back(message("%s: a gap between rows was written to", o.name));
      if (&result == &first) {
        const double allowed =
            std::max(tolerance(o.dtype, kernels.isa), tolerance(acc, kernels.isa)) * o.room;
        if (!o.wanted || !c.results_matter()) continue;
        if (c.is_cache() && o.buffer != &OutputBuffers::out && o.buffer != &OutputBuffers::lse) continue;
        const std::vector<double> got = buffer.read();
        compare(o.name, o.shape, o.packed_along < 0 ? got : padded(c, o.packed_along, o.shape, got),
                o.expected, allowed, errors);
      } else if (!buffer.same_bytes(first.*o.buffer)) {
        errors.push_back(message("%s: with %d threads not the bits of 1 thread", o.name, threads));
      }
    }
  }
  return errors;
}

}  // namespace test
