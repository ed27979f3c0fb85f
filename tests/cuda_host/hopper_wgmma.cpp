// wgmma as the PTX manual defines it. If the manual leaves a choice, the model makes the choice that is worst for the
// kernel. A product reads its operands, also in registers, and writes its accumulators when all threads of the
// warpgroup wait for it. Until then the accumulators hold NaN. Operands in shared memory must have landed before the
// product starts, and each thread must have known it.

#include <set>

#include "fragments.h"
#include "hopper_block.h"

namespace cuda_host {

uintptr_t swizzled(uintptr_t address);  // the 128-byte swizzle permutes address bits

namespace {

constexpr int kRows = 64, kDepth = 16;

struct Matrix {
  uintptr_t start;
  uint32_t leading, stride;

  explicit Matrix(uint64_t descriptor)
      : start(reinterpret_cast<uintptr_t>(shared_begin()) + (descriptor & 0x3fff) * 16),
        leading((descriptor >> 16 & 0x3fff) * 16),
        stride((descriptor >> 32 & 0x3fff) * 16) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
      fail("wgmma takes only the 128-byte swizzle, from a multiple of 1024 bytes on: " + who());
  }

  // Contiguous along k (16 elements), or along the rows (panels of 64).
  uint16_t along_k(int row, int k) const { return at(row / 8 * stride + row % 8 * 128 + k * 2); }
  uint16_t along_rows(int row, int k) const {
    return at(row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2);
  }
  // Whole rows of 128 bytes.
  std::vector<Bytes> bytes_along_k(int rows) const {
    std::vector<Bytes> result;
    for (int row = 0; row < rows; row += 8) {
      const uintptr_t group = start / 128 * 128 + row / 8 * stride;
      if (!result.empty() && result.back().end == group) {
        result.back().end += 1024;
      } else {
        result.push_back({group, group + 1024});
      }
    }
    return result;
  }
  std::vector<Bytes> bytes_along_rows(int rows) const {
    std::vector<Bytes> result;
    for (int panel = 0; panel * 64 < rows; ++panel)
      for (int group = 0; group < kDepth / 8; ++group) {
        const uintptr_t begin = start / 128 * 128 + panel * leading + group * stride;
        result.push_back({begin, begin + 1024});
      }
    return result;
  }

 private:
  uint16_t at(uintptr_t offset) const {
    uint16_t bits;
    std::memcpy(&bits, reinterpret_cast<const void*>(swizzled(start + offset)), sizeof(bits));
    return bits;
  }
};

std::vector<Bytes> bytes_read(const Product& product) {
  const auto bytes_of = [](uint64_t descriptor, int rows, bool by_rows) {
    return by_rows ? Matrix(descriptor).bytes_along_rows(rows) : Matrix(descriptor).bytes_along_k(rows);
  };
  std::vector<Bytes> result = bytes_of(product.b, product.columns, product.b_by_rows);
  if (product.a_registers) return result;
  for (const Bytes& bytes : bytes_of(product.a, kRows, product.a_by_rows)) result.push_back(bytes);
  return result;
}

// The index of register n of a thread's accumulator in a matrix with `columns` columns.
int accumulator_place(int thread, int n, int columns) {
  const Element at = wgmma_accumulator_element(thread, n);
  return at.row * columns + at.column;
}

// c += a b, c 64 x columns.
void multiply(const std::vector<const Product*>& products, std::vector<float>& c) {
  const Product& first = *products[0];
  const int columns = first.columns;
  float a[kRows][kDepth];
  std::vector<float> b(kDepth * columns);
  if (first.a_registers) {
    for (int t = 0; t < kWarpgroup; ++t)
      for (int n = 0; n < 4; ++n)
        for (int e = 0; e < 2; ++e) {
          const Element at = wgmma_a_element(t, n, e);
          a[at.row][at.column] = first.widen(static_cast<uint16_t>(products[t]->a_registers[n] >> 16 * e));
        }
  } else {
    const Matrix matrix(first.a);
    for (int row = 0; row < kRows; ++row)
      for (int k = 0; k < kDepth; ++k)
        a[row][k] = first.widen(first.a_by_rows ? matrix.along_rows(row, k) : matrix.along_k(row, k));
  }
  const Matrix matrix(first.b);
  for (int column = 0; column < columns; ++column)
    for (int k = 0; k < kDepth; ++k)
      b[k * columns + column] =
          first.widen(first.b_by_rows ? matrix.along_rows(column, k) : matrix.along_k(column, k));
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < kDepth; ++k) {
      const float factor = first.negative ? -a[row][k] : a[row][k];
      for (int column = 0; column < columns; ++column)
        c[row * columns + column] += factor * b[k * columns + column];
    }
}

void finish_products(const std::vector<Fiber*>& fibers, int pending) {
  const int first_thread = fibers[0]->thread / kWarpgroup * kWarpgroup;
  Thread* threads = &block.threads[first_thread];
  std::map<float*, std::vector<float>> results;  // key: the accumulator of the first thread
  std::set<Bytes> read;
  size_t done = 0;
  for (; done < threads[0].products.size(); ++done) {
    if (threads[0].products[done].group >= threads[0].groups - pending) break;
    std::vector<const Start*> started;
    std::vector<const Product*> products;
    for (int t = 0; t < kWarpgroup; ++t) {
      if (threads[t].products.size() != threads[0].products.size() || threads[t].groups != threads[0].groups)
        fail("the threads of a warpgroup differ in what they started: " + describe(first_thread + t));
      started.push_back(&threads[t].products[done].start);
      products.push_back(&threads[t].products[done].product);
      if (products[t]->a != products[0]->a || products[t]->b != products[0]->b)
        fail("the threads of a warpgroup differ in their descriptors: " + describe(first_thread + t));
    }
    for (const Bytes& bytes : bytes_read(*products[0]))
      if (read.insert(bytes).second) check_readable("wgmma", bytes, started);
    const int columns = products[0]->columns;
    std::vector<float>& result = results[products[0]->d];
    const bool starts = result.empty();
    if (starts || !products[0]->accumulate) result.assign(kRows * columns, 0);
    if (starts && products[0]->accumulate)
      for (int t = 0; t < kWarpgroup; ++t) {
        const std::vector<float>& before = threads[t].accumulators.at(products[t]->d);
        for (int n = 0; n < columns / 2; ++n) result[accumulator_place(t, n, columns)] = before[n];
      }
    multiply(products, result);
  }
  for (int t = 0; t < kWarpgroup; ++t) {
    auto& products = threads[t].products;
    for (size_t n = 0; n < done; ++n) {
      const auto result = results.find(threads[0].products[n].product.d);
      const Product& product = products[n].product;
      if (threads[t].accumulators.erase(product.d) == 0) continue;  // written already
      for (int e = 0; e < product.columns / 2; ++e)
        product.d[e] = result->second[accumulator_place(t, e, product.columns)];
    }
  }
  for (int t = 0; t < kWarpgroup; ++t) {
    auto& products = threads[t].products;
    products.erase(products.begin(), products.begin() + done);
    threads[t].fenced = false;
    for (const PendingProduct& left : products)
      if (threads[t].accumulators.count(left.product.d) == 0)
        fail("an accumulator of wgmma is in batches before and after a wait: " + describe(first_thread + t));
  }
  for (const Bytes& bytes : read) remember_read(bytes, first_thread, fibers);
}

}  // namespace

void check_no_product_reads(const char* writer, const Bytes& target) {
  for (const Thread& thread : block.threads)
    for (const PendingProduct& product : thread.products)
      for (const Bytes& bytes : bytes_read(product.product))
        if (bytes.overlaps(target))
          fail(std::string(writer) + " overwrites what a wgmma still reads: " + who());
}

// These instructions are .sync.aligned: no lane continues before all lanes of its warp are at the same instruction.
void wgmma_fence(Site site) {
  align_warp(site);
  block.threads[current->thread].fenced = true;
}

void wgmma(Site site, const Product& product) {
  align_warp(site);
  Thread& self = block.threads[current->thread];
  if (!self.fenced) fail("wgmma without a fence at the start of its batch: " + text(site) + ", " + who());
  const int count = product.columns / 2;
  if (self.accumulators.count(product.d) == 0) {
    self.accumulators[product.d].assign(product.d, product.d + count);
    std::fill(product.d, product.d + count, NAN);
  }
  self.products.push_back({product, self.groups, {current->thread, current->now, current->known}});
}

// Each batch needs a fence. If it is missing, ptxas inserts one and warns (C7519).
void wgmma_commit(Site site) {
  align_warp(site);
  ++block.threads[current->thread].groups;
  block.threads[current->thread].fenced = false;
}

void wgmma_wait(Site site, int pending) {
  meet_warpgroup(site, [pending](const std::vector<Fiber*>& fibers) { finish_products(fibers, pending); });
}

}  // namespace cuda_host
