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

constexpr int kRows = 64, kMaxDepth = 32;

struct Matrix {
  int element_bytes;
  uintptr_t start;
  uint32_t leading, stride;

  Matrix(uint64_t descriptor, int element_bytes, int rank)
      : element_bytes(element_bytes),
        start(reinterpret_cast<uintptr_t>(shared_of_rank(rank)) + (descriptor & 0x3fff) * 16),
        leading((descriptor >> 16 & 0x3fff) * 16),
        stride((descriptor >> 32 & 0x3fff) * 16) {
    if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0)
      fail("wgmma takes only the 128-byte swizzle, from a multiple of 1024 bytes on: " + who());
  }

  // Contiguous along k (32 bytes), or along the rows (panels of 64, elements of 16 bits).
  uint16_t along_k(int row, int k) const { return at(row / 8 * stride + row % 8 * 128 + k * element_bytes); }
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
  // The 32 bytes of each row. Tiles of 8-bit elements have columns that no product reads and nobody writes.
  std::vector<Bytes> exact_bytes_along_k(int rows) const {
    std::vector<Bytes> result;
    for (int row = 0; row < rows; ++row) {
      const uintptr_t begin = swizzled(start + row / 8 * stride + row % 8 * 128) / 32 * 32;
      result.push_back({begin, begin + 32});
    }
    return result;
  }
  std::vector<Bytes> bytes_along_rows(int rows) const {
    std::vector<Bytes> result;
    for (int panel = 0; panel * 64 < rows; ++panel)
      for (int group = 0; group < 2; ++group) {
        const uintptr_t begin = start / 128 * 128 + panel * leading + group * stride;
        result.push_back({begin, begin + 1024});
      }
    return result;
  }

 private:
  uint16_t at(uintptr_t offset) const {
    uint16_t bits = 0;
    std::memcpy(&bits, reinterpret_cast<const void*>(swizzled(start + offset)), element_bytes);
    return bits;
  }
};

// `exact`: only the bytes that count, if the elements have 8 bits.
std::vector<Bytes> bytes_read(const Product& product, bool exact = false) {
  const auto bytes_of = [&](uint64_t descriptor, int rows, bool by_rows) {
    const Matrix matrix(descriptor, product.element_bytes, product.rank);
    if (exact && product.element_bytes == 1) return matrix.exact_bytes_along_k(rows);
    return by_rows ? matrix.bytes_along_rows(rows) : matrix.bytes_along_k(rows);
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
  const int columns = first.columns, depth = first.depth(), bits = 8 * first.element_bytes;
  float a[kRows][kMaxDepth];
  std::vector<float> b(depth * columns);
  if (first.a_registers) {
    for (int t = 0; t < kWarpgroup; ++t)
      for (int n = 0; n < 4; ++n)
        for (int e = 0; e < 32 / bits; ++e) {
          const Element at = bits == 8 ? wgmma_a_byte(t, n, e) : wgmma_a_element(t, n, e);
          const uint32_t element = products[t]->a_registers[n] >> bits * e & ((1u << bits) - 1);
          a[at.row][at.column] = first.widen(static_cast<uint16_t>(element));
        }
  } else {
    const Matrix matrix(first.a, first.element_bytes, first.rank);
    for (int row = 0; row < kRows; ++row)
      for (int k = 0; k < depth; ++k)
        a[row][k] = first.widen(first.a_by_rows ? matrix.along_rows(row, k) : matrix.along_k(row, k));
  }
  const Matrix matrix(first.b, first.element_bytes, first.rank);
  for (int column = 0; column < columns; ++column)
    for (int k = 0; k < depth; ++k)
      b[k * columns + column] =
          first.widen(first.b_by_rows ? matrix.along_rows(column, k) : matrix.along_k(column, k));
  for (int row = 0; row < kRows; ++row)
    for (int k = 0; k < depth; ++k) {
      const float factor = first.negative ? -a[row][k] : a[row][k];
      for (int column = 0; column < columns; ++column)
        c[row * columns + column] += factor * b[k * columns + column];
    }
}

void finish_products(const std::vector<Fiber*>& fibers, int pending) {
  const int first_thread = fibers[0]->thread / kWarpgroup * kWarpgroup;
  Thread* threads = &block.threads[first_thread];
  std::map<float*, std::vector<float>> results;  // key: the accumulator of the first thread
  std::set<Bytes> checked, read;
  size_t done = 0;
  for (; done < threads[0].products.size(); ++done) {
    if (threads[0].products[done].group >= threads[0].groups - pending) break;
    std::vector<const Start*> started;
    std::vector<const Product*> products;
    for (int t = 0; t < kWarpgroup; ++t) {
      if (threads[t].products.size() != threads[0].products.size() || threads[t].groups != threads[0].groups)
        fail("the threads of a warpgroup started different operations: " + describe(first_thread + t));
      started.push_back(&threads[t].products[done].start);
      products.push_back(&threads[t].products[done].product);
      if (products[t]->a != products[0]->a || products[t]->b != products[0]->b)
        fail("the threads of a warpgroup differ in their descriptors: " + describe(first_thread + t));
    }
    for (const Bytes& bytes : bytes_read(*products[0], true))
      if (checked.insert(bytes).second) check_readable("wgmma", bytes, started);
    for (const Bytes& bytes : bytes_read(*products[0])) read.insert(bytes);
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
          fail(std::string(writer) + " overwrites bytes that a wgmma still reads: " + who());
}

// These instructions are .sync.aligned: no lane continues before all lanes of its warp are at the same instruction.
void wgmma_fence(Site site) {
  align_warp(site);
  block.threads[current->thread].fenced = true;
}

void wgmma(Site site, const Product& by_kernel) {
  align_warp(site);
  Product product = by_kernel;
  product.rank = own_rank();
  if (product.element_bytes == 1 && (product.a_by_rows || product.b_by_rows))
    fail("wgmma of 8-bit elements with an operand by rows: " + text(site));
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
