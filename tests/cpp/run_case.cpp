#include "run_case.h"

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <thread>

#include "buffers.h"

namespace test {
namespace {

using namespace flash_attn_ext;

// Errors allowed, relative to the largest value of the tensor, or to 1 if that is smaller. The accumulator's
// rounding, and half a unit in the last place of the 16-bit types with a little room; twice that where P and
// dS are rounded to bfloat16 before the products.
double tolerance(DType dtype, const std::string& isa) {
  switch (dtype) {
    case DType::kFloat64: return 1e-13;
    case DType::kBFloat16: return (isa == "avx512_bf16" ? 2.2 : 1.1) / 256;
    case DType::kFloat16: return 1.1 / 2048;
    default: return 4e-6;
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

// The tensors that the kernels read.
struct InputBuffers {
  InputBuffers(const Case& c, DType dtype, const Inputs& in)
      : acc(accumulator_of(dtype)),
        q("q", dtype, c.q_shape(), c.layout),
        k("k", dtype, c.k_shape(), c.layout),
        v("v", dtype, c.v_shape(), c.layout),
        dout("dout", dtype, c.expanded_dout ? Shape{1, 1, 1, c.sizes.head_dim_v} : c.out_shape(), c.layout),
        mask("mask", c.mask ? c.mask->dtype : DType::kBool, c.mask_shape(),
             c.mask ? c.mask->layout : Layout{}),
        slopes("slopes", acc, c.slopes_shape(), c.layout),
        dlse("dlse", acc, c.dlse ? c.lse_shape() : Shape{0, 0, 0, 0}, {}),
        rng_state(new int64_t[2]{in.rng_state[0], in.rng_state[1]}) {
    q.write(in.q);
    k.write(in.k);
    v.write(in.v);
    dout.write(in.dout);
    mask.write(in.mask);
    slopes.write(in.slopes);
    dlse.write(in.dlse);
  }

  void fill(const Case& c, DType dtype, AttentionParams& p) const {
    p.dtype = dtype;
    p.sizes = c.sizes;
    p.q = q.view();
    p.k = k.view();
    p.v = v.view();
    p.scale = c.scale != 0 ? c.scale : 1 / std::sqrt(static_cast<double>(c.sizes.head_dim));
    p.softcap = c.softcap;
    p.band = band_of(c);
    p.decode = c.decode;
    if (c.mask) {
      auto stride = [&](int dim) { return c.mask_shape()[dim] == 1 ? 0 : mask.stride(dim); };
      p.mask = {mask.data(), c.mask->dtype, stride(0), stride(1), stride(2), stride(3)};
    }
    if (c.slopes != Slopes::kNone)
      p.alibi = {slopes.data(), c.slopes == Slopes::kPerHead ? 0 : slopes.stride(0), slopes.stride(3)};
    if (c.dropout_p > 0) {
      p.dropout.rng_state = rng_state.get();
      p.dropout.threshold = static_cast<uint64_t>(std::llround(std::ldexp(c.dropout_p, 32)));
      p.dropout.keep_scale = c.dropout_p < 1 ? 1 / (1 - c.dropout_p) : 0;
    }
  }

  DType acc;
  TensorBuffer q, k, v, dout, mask, slopes, dlse;
  std::unique_ptr<int64_t[]> rng_state;
};

// What one run writes. The backward gets its out and lse from the reference: it is tested by itself.
struct OutputBuffers {
  OutputBuffers(const Case& c, DType dtype)
      : out("out", dtype, c.out_shape(), c.layout),
        lse("lse", accumulator_of(dtype), c.lse_shape(), {}),
        dq("dq", dtype, c.q_shape(), c.layout),
        dk("dk", dtype, c.k_shape(), c.layout),
        dv("dv", dtype, c.v_shape(), c.layout),
        dmask("dmask", c.mask ? c.mask->dtype : DType::kBool, c.mask_shape(), {}),
        dslopes("dslopes", accumulator_of(dtype), c.dslopes_shape(), {}) {}

  TensorBuffer out, lse, dq, dk, dv, dmask, dslopes;
};

void run_kernels(const cpu::Kernels& kernels, const Case& c, DType dtype, const InputBuffers& in,
                 const Outputs& expected, int threads, OutputBuffers& result) {
  const cpu::Parallel parallel{threads, run_on_std_threads};
  const size_t cut = short_buffer == "workspace" ? 64 : 0;

  AttentionParams forward;
  in.fill(c, dtype, forward);
  forward.out = result.out.view();
  forward.lse = result.lse.data();
  {
    const Buffer workspace(kernels.forward_workspace(forward, threads) - cut, 64);
    kernels.forward(forward, workspace.data(), parallel);
  }

  TensorBuffer out("saved out", dtype, c.out_shape(), c.layout), lse("saved lse", in.acc, c.lse_shape(), {});
  out.write(expected.out);
  lse.write(expected.lse);
  BackwardParams backward;
  in.fill(c, dtype, backward);
  backward.out = out.view();
  backward.lse = lse.data();
  backward.dout = in.dout.view();
  if (c.expanded_dout) backward.dout = {in.dout.data(), 0, 0, 0};
  backward.dlse = c.dlse ? in.dlse.data() : nullptr;
  if (c.wanted.dq) backward.dq = result.dq.view();
  if (c.wanted.dk) backward.dk = result.dk.view();
  if (c.wanted.dv) backward.dv = result.dv.view();
  const Shape m = c.mask_shape();
  if (c.wants_dmask()) backward.dmask = {result.dmask.data(), m[0], m[1], m[2], m[3]};
  if (c.wants_dslopes()) backward.dalibi_slopes = result.dslopes.data();
  const Buffer workspace(kernels.backward_workspace(backward, threads) - cut, 64);
  kernels.backward(backward, workspace.data(), parallel);
}

std::string message(const char* format, ...) {
  char text[256];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  return text;
}

// Compares one output; appends what is wrong to `errors`. `shape` names the place of the worst element.
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

}  // namespace

std::vector<std::string> run_case(const cpu::Kernels& kernels, const Case& c, DType dtype, const Inputs& in,
                                  const Outputs& expected) {
  struct Output {
    const char* name;
    bool wanted;
    DType dtype;
    Shape shape;
    TensorBuffer OutputBuffers::* buffer;
    const std::vector<double>& expected;
  };
  const DType acc = accumulator_of(dtype), mask_dtype = c.mask ? c.mask->dtype : acc;
  const Output outputs[] = {
      {"out", true, dtype, c.out_shape(), &OutputBuffers::out, expected.out},
      {"lse", true, acc, c.lse_shape(), &OutputBuffers::lse, expected.lse},
      {"dq", c.wanted.dq, dtype, c.q_shape(), &OutputBuffers::dq, expected.dq},
      {"dk", c.wanted.dk, dtype, c.k_shape(), &OutputBuffers::dk, expected.dk},
      {"dv", c.wanted.dv, dtype, c.v_shape(), &OutputBuffers::dv, expected.dv},
      {"dmask", c.wants_dmask(), mask_dtype, c.mask_shape(), &OutputBuffers::dmask, expected.dmask},
      {"dslopes", c.wants_dslopes(), acc, c.dslopes_shape(), &OutputBuffers::dslopes, expected.dslopes},
  };
  const InputBuffers inputs(c, dtype, in);
  OutputBuffers first(c, dtype);
  std::vector<std::string> errors;
  for (const int threads : kThreadCounts) {
    OutputBuffers again(c, dtype);
    OutputBuffers& result = threads == kThreadCounts[0] ? first : again;
    run_kernels(kernels, c, dtype, inputs, expected, threads, result);
    for (const Output& o : outputs) {
      TensorBuffer& buffer = result.*o.buffer;
      if (!buffer.open_gaps()) errors.push_back(message("%s: a gap between rows was written to", o.name));
      if (&result == &first) {
        const double allowed = std::max(tolerance(o.dtype, kernels.isa), tolerance(acc, kernels.isa));
        if (o.wanted) compare(o.name, o.shape, buffer.read(), o.expected, allowed, errors);
      } else if (!buffer.same_bytes(first.*o.buffer)) {
        errors.push_back(message("%s: with %d threads not the bits of 1 thread", o.name, threads));
      }
    }
  }
  return errors;
}

}  // namespace test
