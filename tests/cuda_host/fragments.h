// The matrix element in each register of each thread, for ldmatrix, stmatrix, mma.sync and wgmma. The host models use these
// functions. tests/cpp/cute_layouts.cpp compares them with CuTe's layouts.
#pragma once

namespace cuda_host {

struct Element {
  int row, column;
};

// ldmatrix, stmatrix: the lane that points to a row of the m-th 8 x 8 matrix.
constexpr int lane_of_row(int m, int row) { return 8 * m + row; }

// Half e of a lane's register of one 8 x 8 matrix of 16-bit elements.
constexpr Element matrix_element(int lane, int e, bool transposed) {
  const int g = lane / 4, t = lane % 4;
  return transposed ? Element{2 * t + e, g} : Element{g, 2 * t + e};
}

// mma.sync m16n8k16: half e of register r of A (16 x 16) and of B (16 x 8), and register r of C (16 x 8).
constexpr Element mma_a_element(int lane, int r, int e) {
  return {lane / 4 + r % 2 * 8, lane % 4 * 2 + r / 2 * 8 + e};
}
constexpr Element mma_b_element(int lane, int r, int e) { return {lane % 4 * 2 + r * 8 + e, lane / 4}; }
constexpr Element mma_c_element(int lane, int r) { return {lane / 4 + r / 2 * 8, lane % 4 * 2 + r % 2}; }

// wgmma: half e of register r of A (64 x 16), and register r of the accumulator (64 x N), of thread 0 to 127.
constexpr Element wgmma_a_element(int thread, int r, int e) {
  return {thread / 32 * 16 + thread % 32 / 4 + r % 2 * 8, thread % 4 * 2 + r / 2 * 8 + e};
}
// The same for 8-bit elements, A 64 x 32: byte e of register r.
constexpr Element wgmma_a_byte(int thread, int r, int e) {
  return {thread / 32 * 16 + thread % 32 / 4 + r % 2 * 8, thread % 4 * 4 + r / 2 * 16 + e};
}
constexpr Element wgmma_accumulator_element(int thread, int r) {
  return {thread / 32 * 16 + thread % 32 / 4 + r % 4 / 2 * 8, r / 4 * 8 + thread % 4 * 2 + r % 2};
}

}  // namespace cuda_host
