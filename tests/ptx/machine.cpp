#include "machine.h"

#include <string>
#include <utility>

#include "include/cuda_bf16.h"
#include "include/cuda_fp16.h"
#include "memory.h"

namespace ptx {

int fault = 0;

namespace {

int running_line = 0;

// The shared memory of the block that runs.
unsigned char* own_shared() { return cuda_host::shared_of_rank(cuda_host::own_rank()); }

bool is_shared(const void* address) {
  const auto* bytes = static_cast<const unsigned char*>(address);
  return own_shared() <= bytes && bytes < own_shared() + cuda_host::kMaxSharedBytes;
}

}  // namespace

void at_line(int line) { running_line = line; }

void fail(int line, const char* what) {
  at_line(line);
  cuda_host::fail(std::string(what) + ": " + cuda_host::who());
}

uint32_t shared_base() { return static_cast<uint32_t>(cuda_host::own_rank()) << kRankShift | kSharedBase; }

unsigned char* shared_bytes(uint64_t address) {
  if (address < shared_base() || address >= shared_base() + cuda_host::kMaxSharedBytes)
    fail(running_line, "not an address of the block's shared memory");
  return own_shared() + (address - shared_base());
}

unsigned char* generic_bytes(uint64_t address) { return reinterpret_cast<unsigned char*>(address); }

unsigned char* global_bytes(uint64_t address) {
  if (is_shared(generic_bytes(address))) fail(running_line, "an address of shared memory as a global one");
  return generic_bytes(address);
}

uint64_t generic_to_shared(int line, uint64_t address) {
  if (!is_shared(generic_bytes(address))) fail(line, "not an address of shared memory");
  return generic_bytes(address) - own_shared() + shared_base();
}

uint64_t shared_to_generic(int line, uint64_t address) {
  at_line(line);
  return reinterpret_cast<uint64_t>(shared_bytes(address));
}

void touch(int line, const void* address, size_t bytes, bool is_write) {
  at_line(line);
  cuda_host::touch(address, bytes, is_write, __builtin_return_address(0));
}

// A loop that waits for another block's turn reads the same number again and again. It goes on when that number has
// changed; until then other blocks may.
int32_t acquire(int line, unsigned char* address) {
  at_line(line);
  return cuda_host::acquire_number({"ld.acquire", "ptx", line}, reinterpret_cast<const int32_t*>(address));
}

float atomic_add(int line, unsigned char* address, float x) {
  at_line(line);
  return atomicAdd(reinterpret_cast<float*>(address), x);
}

uint32_t atomic_add(int line, unsigned char* address, uint32_t x) {
  at_line(line);
  return cuda_host::add_atomically(reinterpret_cast<int*>(address), static_cast<int>(x));
}

int32_t atomic_add(int line, unsigned char* address, int32_t x) {
  return static_cast<int32_t>(atomic_add(line, address, static_cast<uint32_t>(x)));
}

namespace {

unsigned long long* number(unsigned char* address) { return reinterpret_cast<unsigned long long*>(address); }

}  // namespace

uint64_t atomic_add(int line, unsigned char* address, uint64_t x) {
  at_line(line);
  return atomicAdd(number(address), x);
}
uint64_t atomic_max(int line, unsigned char* address, uint64_t x) {
  at_line(line);
  return atomicMax(number(address), x);
}
uint64_t atomic_or(int line, unsigned char* address, uint64_t x) {
  at_line(line);
  return atomicOr(number(address), x);
}

void release_add(int line, unsigned char* address, int32_t x) {
  if (x != 1) fail(line, "a turn ends by an addition of 1");
  at_line(line);
  cuda_host::release_bulk_turn({"red.release", "ptx", line}, reinterpret_cast<int*>(address));
}

void cp_async(int line, unsigned char* shared, const unsigned char* global, int bytes, uint32_t read) {
  if (read != 0 && read != static_cast<uint32_t>(bytes)) fail(line, "a part of a cp.async is not known");
  at_line(line);
  if (bytes == 16) return cuda_host::cp_async_16(shared, global, read != 0);
  if (bytes == 4) return cuda_host::cp_async_4(shared, global, read != 0);
  fail(line, "cp.async of 8 bytes is not known");
}

void ldmatrix(cuda_host::Site site, uint32_t* r, const unsigned char* row, bool transposed) {
  cuda_host::ldmatrix_x4(site, r, row, transposed);
}

void stmatrix(cuda_host::Site site, unsigned char* row, const uint32_t* r) {
  cuda_host::store_matrices(site, row, r);
}

void meet(cuda_host::Site site, uint32_t barrier, uint32_t threads) {
  if (barrier == 0 && (threads == 0 || threads == blockDim.x)) {
    cuda_host::meet_block(site, 0);
  } else {
    cuda_host::meet_named(site, static_cast<int>(barrier), static_cast<int>(threads ? threads : blockDim.x));
  }
}

void meet_warp(cuda_host::Site site, uint32_t mask) { cuda_host::meet_warp(site, mask); }

uint32_t ballot(cuda_host::Site site, bool predicate, uint32_t mask) {
  return __ballot_sync(mask, predicate, site.file, site.line);
}

uint32_t elect(cuda_host::Site site, uint32_t mask) {
  return __builtin_ctz(__ballot_sync(mask, 1, site.file, site.line));
}

namespace {

// The manual's loop of shfl.sync: `c` holds the highest lane of a segment and the mask of the segment's bits.
template <class Lane>
Taken shuffle(cuda_host::Site site, uint32_t value, uint32_t c, uint32_t mask, bool up, const Lane& source) {
  const int lane = cuda_host::lane(), clamp = c & 31, segments = c >> 8 & 31;
  const int last = (lane & segments) | (clamp & ~segments), first = lane & segments;
  const int from = source(lane, first, segments);
  const bool inside = up ? from >= last : from <= last;
  return {cuda_host::take_from_lane(site, mask, value, inside ? from : lane), inside};
}

}  // namespace

Taken shuffle_idx(cuda_host::Site site, uint32_t value, uint32_t b, uint32_t c, uint32_t mask) {
  return shuffle(site, value, c, mask, false, [b](int, int first, int segments) {
    return first | (static_cast<int>(b & 31) & ~segments);
  });
}
Taken shuffle_bfly(cuda_host::Site site, uint32_t value, uint32_t b, uint32_t c, uint32_t mask) {
  return shuffle(site, value, c, mask, false,
                 [b](int lane, int, int) { return lane ^ static_cast<int>(b & 31); });
}
Taken shuffle_up(cuda_host::Site site, uint32_t value, uint32_t b, uint32_t c, uint32_t mask) {
  return shuffle(site, value, c, mask, true,
                 [b](int lane, int, int) { return lane - static_cast<int>(b & 31); });
}
Taken shuffle_down(cuda_host::Site site, uint32_t value, uint32_t b, uint32_t c, uint32_t mask) {
  return shuffle(site, value, c, mask, false,
                 [b](int lane, int, int) { return lane + static_cast<int>(b & 31); });
}

uint32_t address_in_cluster(int line, uint32_t address, uint32_t rank) {
  at_line(line);
  shared_bytes(address);
  if (rank >= static_cast<uint32_t>(cuda_host::kMostRanks)) fail(line, "the cluster has not this block");
  return rank << kRankShift | (address & kOffset);
}

void arrive_in_cluster(cuda_host::Site site, uint32_t address) {
  at_line(site.line);
  unsigned char* const own = shared_bytes(shared_base() & ~kOffset | (address & kOffset));
  cuda_host::barrier_arrive_in_cluster(site, barrier(own), address >> kRankShift);
}

const CUtensorMap* tensor_map(uint64_t address) {
  if (address % 64 != 0) fail(running_line, "a tensor map that is not at a multiple of 64 bytes");
  return reinterpret_cast<const CUtensorMap*>(address);
}

uint64_t descriptor(int line, uint64_t of_wgmma) {
  constexpr uint64_t kBase = kSharedBase / 16, kAddress = 0x3fff;
  if ((of_wgmma & kAddress) < kBase) fail(line, "a descriptor of what is not shared memory");
  return of_wgmma - kBase;
}

void bulk_add(cuda_host::Site site, unsigned char* sums, const unsigned char* terms, uint32_t bytes) {
  if (bytes % sizeof(float) != 0) fail(site.line, "a part of a float");
  cuda_host::bulk_add(site, reinterpret_cast<float*>(sums), reinterpret_cast<const float*>(terms),
                      bytes / sizeof(float));
}

uint32_t brev(uint32_t a) {
  uint32_t result = 0;
  for (int n = 0; n < 32; ++n) result |= (a >> n & 1) << (31 - n);
  return result;
}

uint32_t bmsk_clamp(uint32_t first, uint32_t count) {
  const uint64_t ones = count < 32 ? (uint64_t{1} << count) - 1 : ~uint32_t{0};
  return first < 32 ? static_cast<uint32_t>(ones << first) : 0;
}

uint32_t bfe(uint32_t a, uint32_t first, uint32_t count) {
  return shift_right(a, first & 255) & bmsk_clamp(0, count & 255);
}
uint64_t bfe(uint64_t a, uint32_t first, uint32_t count) {
  count &= 255;
  return shift_right(a, first & 255) & (count < 64 ? (uint64_t{1} << count) - 1 : ~uint64_t{0});
}
int32_t bfe(int32_t a, uint32_t first, uint32_t count) {
  first &= 255, count &= 255;
  if (count == 0) return 0;
  const uint32_t sign_at = std::min<uint32_t>(first + count - 1, 31);
  const uint32_t sign = static_cast<uint32_t>(a) >> sign_at & 1;
  const uint32_t ones = bmsk_clamp(0, count);
  const uint32_t taken = shift_right(static_cast<uint32_t>(a), first);
  return static_cast<int32_t>(sign ? (taken | ~bmsk_clamp(0, sign_at + 1 - std::min(first, sign_at + 1)))
                                   : taken & ones);
}
uint32_t bfi(uint32_t a, uint32_t b, uint32_t first, uint32_t count) {
  const uint32_t mask = bmsk_clamp(first & 255, count & 255);
  return (shift_left(a, first & 255) & mask) | (b & ~mask);
}

uint64_t bfi(uint64_t a, uint64_t b, uint32_t first, uint32_t count) {
  const uint64_t bits = (count & 255) >= 64 ? ~uint64_t{0} : (uint64_t{1} << (count & 255)) - 1;
  const uint64_t mask = shift_left(bits, first & 255);
  return (shift_left(a, first & 255) & mask) | (b & ~mask);
}

uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) { return cuda_host::choose_bytes(a, b, selector); }

uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int n = 0; n < 32; ++n)
    result |= (table >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1)) & 1) << n;
  return result;
}

namespace {

// From -1 to 1, the same for the same x.
double deviation(float x) { return static_cast<int32_t>(bits<uint32_t>(x) * 2654435761u) * 0x1p-31; }

}  // namespace

float reciprocal(float x) {
  const auto y = static_cast<float>(1 / static_cast<double>(x) * (1 + deviation(x) * 0x1p-23));
  return std::abs(y) < std::numeric_limits<float>::min() ? std::copysign(0.0f, y) : y;  // NaN stays
}

double gross_reciprocal(double x) {
  const double y = std::abs(1 / x) < std::numeric_limits<double>::min() ? std::copysign(0.0, x) : 1 / x;
  return bits<double>(bits<uint64_t>(y) >> 32 << 32);
}

float tanh(float x) {
  return static_cast<float>(std::tanh(static_cast<double>(x)) * (1 + deviation(x) * 0x1p-11));
}

float exp2(float x) {
  return static_cast<float>(std::exp2(static_cast<double>(x)) * (1 + deviation(x) * 0x1p-22));
}

uint16_t to_half(float x) { return bits<uint16_t>(__float2half_rn(x)); }
uint16_t to_bfloat16(float x) { return __float2bfloat16_rn(x).bits; }
float from_half(uint16_t x) { return __half2float(bits<__half>(x)); }
float from_bfloat16(uint16_t x) { return __bfloat162float({x}); }

}  // namespace ptx

extern "C" {

void add_translated(const char* mangled, void (*run)(const unsigned char*), size_t param_bytes);

// For kernels.py.
void ptx_install() {
  for (const ptx::Kernel* kernel = ptx::kernels; kernel->name; ++kernel)
    add_translated(kernel->name, kernel->run, kernel->param_bytes);
}
void ptx_set_fault(int number) { ptx::fault = number; }
// Runs a kernel of this file that no host code launches. Returns null or an error text.
const char* ptx_launch(int which, unsigned blocks, unsigned threads, size_t shared_bytes, const void* params,
                       size_t param_bytes) {
  static std::string error;
  cuda_host::TranslatedKernel translated;
  translated.run = ptx::kernels[which].run;
  std::memcpy(translated.params, params, param_bytes);
  const auto enter = [](void* pointer) {
    const auto* chosen = static_cast<cuda_host::TranslatedKernel*>(pointer);
    chosen->run(chosen->params);
  };
  const cudaLaunchConfig_t config{dim3(blocks), dim3(threads), shared_bytes, nullptr};
  const auto* kernel = reinterpret_cast<const void*>(translated.run);
  const bool launched =
      cuda_host::run_grid(config, kernel, enter, &translated, sizeof(translated)) == cudaSuccess;
  error = cuda_host::take_error();
  return launched ? nullptr : error.c_str();
}
// The line that ran last, once.
int ptx_take_line() { return std::exchange(ptx::running_line, 0); }
}
