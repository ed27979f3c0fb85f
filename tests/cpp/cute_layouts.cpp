// Compares with CuTe, element by element: the layouts and descriptors of csrc/cuda/sm90/panels.h, and the elements in
// each register of a thread. The host models of the instructions give the elements. Prints differences.
#include <cstdint>
#include <cstdio>

#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
// Shared memory is this array here, so that a descriptor's address is an offset into it.
alignas(1024) static unsigned char shared_bytes[128 << 10];
static size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - shared_bytes;
}

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED 1
#include <cute/atom/copy_traits_sm75.hpp>
#include <cute/atom/copy_traits_sm90.hpp>
#include <cute/atom/mma_traits_sm80.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "cuda/sm90/panels.h"
#include "fragments.h"

using namespace cute;
namespace sm90 = flash_attn_ext::cuda::sm90;
static int differences = 0, compared = 0;

static void compare(const char* what, int rows, int columns, int at, uint64_t ours, uint64_t theirs) {
  ++compared;
  if (ours == theirs) return;
  ++differences;
  std::printf("%s of %d x %d, %d: ours %llx, CuTe's %llx\n", what, rows, columns, at,
              (unsigned long long)ours, (unsigned long long)theirs);
}

// The descriptors along rows, which only 16-bit elements have.
template <class Tile, int kRows, int kColumns, class Element, class Layout>
void compare_descriptors_along_rows(const Layout& layout) {
  auto* start = reinterpret_cast<Element*>(shared_bytes);
  const auto transposed = make_tensor(
      make_smem_ptr(start),
      composition(layout, make_layout(Shape<Int<kColumns>, Int<kRows>>{}, Stride<Int<kRows>, _1>{})));
  for (int k = 0; k < kRows / 16; ++k) {
    const auto part = local_tile(transposed, Shape<Int<kColumns>, _16>{}, make_coord(0, k));
    // With one panel there is no distance between panels.
    const uint64_t all_but_leading = Tile::kCount > 1 ? ~uint64_t{0} : ~(uint64_t{0x3fff} << 16);
    compare("descriptor along rows", kRows, kColumns, k, sm90::along_rows<Tile>(0, k) & all_but_leading,
            SM90::GMMA::make_gmma_desc<SM90::GMMA::Major::MN>(part).desc_ & all_but_leading);
  }
}

template <int kRows, int kColumns, class Element = cute::bfloat16_t>
void compare_tile() {
  using Tile = sm90::Panels<Element, kRows, kColumns>;
  constexpr int kDepth = 32 / sizeof(Element);  // of one wgmma
  const auto layout =
      tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kColumns>>{});
  const auto in_elements = as_position_independent_swizzle_layout(layout);
  for (int row = 0; row < kRows; ++row)
    for (int column = 0; column < kColumns; ++column)
      compare("element", kRows, kColumns, row * kColumns + column, Tile::offset(row, column),
              in_elements(row, column) * sizeof(Element));

  auto* start = reinterpret_cast<Element*>(shared_bytes);
  const auto tile = make_tensor(make_smem_ptr(start), layout);
  for (int k = 0; k < kColumns / kDepth; ++k) {
    const auto part = local_tile(tile, Shape<Int<kRows>, Int<kDepth>>{}, make_coord(0, k));
    compare("descriptor along columns", kRows, kColumns, k, sm90::along_columns<Tile>(0, k),
            SM90::GMMA::make_gmma_desc<SM90::GMMA::Major::K>(part).desc_);
  }
  if constexpr (sizeof(Element) == 2) compare_descriptors_along_rows<Tile, kRows, kColumns, Element>(layout);
}

// A fragment's layout maps (thread, n) to a place in a matrix that is stored by columns. Where a register holds
// a pair, n counts halves.
template <class Layout, class Ours>
void compare_fragment(const char* what, int rows, int columns, Layout layout, Ours ours) {
  for (int thread = 0; thread < size<0>(layout); ++thread)
    for (int n = 0; n < size<1>(layout); ++n) {
      const cuda_host::Element at = ours(thread, n);
      compare(what, rows, columns, thread * size<1>(layout) + n, at.row + at.column * rows,
              layout(thread, n));
    }
}

template <class Traits>
void compare_accumulator() {
  constexpr int kColumns = size<1>(typename Traits::Shape_MNK{});
  compare_fragment("wgmma accumulator", 64, kColumns, typename Traits::CLayout{},
                   cuda_host::wgmma_accumulator_element);
}

template <class Traits>
void compare_mma() {
  compare_fragment("mma A", 16, 16, typename Traits::ALayout{},
                   [](int lane, int n) { return cuda_host::mma_a_element(lane, n / 2, n % 2); });
  // CuTe's B is N x K.
  compare_fragment("mma B", 8, 16, typename Traits::BLayout{}, [](int lane, int n) {
    const cuda_host::Element at = cuda_host::mma_b_element(lane, n / 2, n % 2);
    return cuda_host::Element{at.column, at.row};
  });
  compare_fragment("mma C", 16, 8, typename Traits::CLayout{}, cuda_host::mma_c_element);
}

// Copies of four 8 x 8 matrices: CuTe counts bits; `memory` is the side where a lane has a row of 128 bits.
template <class Memory, class Registers>
void compare_matrices(const char* what, Memory memory, Registers registers, bool transposed) {
  constexpr int kMatrixBits = 64 * 16, kRowBits = 128;
  for (int m = 0; m < 4; ++m)
    for (int row = 0; row < 8; ++row)
      compare(what, 8, 8, m * 8 + row, m * kMatrixBits + row * kRowBits,
              memory(cuda_host::lane_of_row(m, row), 0));
  for (int lane = 0; lane < 32; ++lane)
    for (int m = 0; m < 4; ++m)
      for (int e = 0; e < 2; ++e) {
        const cuda_host::Element at = cuda_host::matrix_element(lane, e, transposed);
        compare(what, 8, 8, lane * 8 + m * 2 + e, m * kMatrixBits + at.row * kRowBits + at.column * 16,
                registers(lane, m * 32 + e * 16));
      }
}

void compare_fragments() {
  constexpr auto kK = GMMA::Major::K;
  compare_fragment("wgmma A", 64, 16, typename MMA_Traits<SM90_64x64x16_F32BF16BF16_RS<kK, kK>>::ALayout{},
                   [](int thread, int n) { return cuda_host::wgmma_a_element(thread, n / 2, n % 2); });
  compare_fragment("wgmma A of 8 bits", 64, 32,
                   typename MMA_Traits<SM90_64x64x32_F32E4M3E4M3_RS_TN<>>::ALayout{},
                   [](int thread, int n) { return cuda_host::wgmma_a_byte(thread, n / 4, n % 4); });
  compare_accumulator<MMA_Traits<SM90_64x96x32_F32E4M3E4M3_SS_TN<>>>();
  compare_accumulator<MMA_Traits<SM90_64x128x32_F32E4M3E4M3_SS_TN<>>>();
  compare_accumulator<MMA_Traits<SM90_64x64x32_F32E4M3E4M3_RS_TN<>>>();
  compare_accumulator<MMA_Traits<SM90_64x256x32_F32E4M3E4M3_RS_TN<>>>();
  compare_accumulator<MMA_Traits<SM90_64x32x16_F32BF16BF16_SS<kK, kK>>>();
  compare_accumulator<MMA_Traits<SM90_64x64x16_F32BF16BF16_SS<kK, kK>>>();
  compare_accumulator<MMA_Traits<SM90_64x80x16_F32BF16BF16_SS<kK, kK>>>();
  compare_accumulator<MMA_Traits<SM90_64x128x16_F32F16F16_RS<kK, GMMA::Major::MN>>>();
  compare_accumulator<MMA_Traits<SM90_64x256x16_F32BF16BF16_RS<kK, GMMA::Major::MN>>>();
  compare_mma<MMA_Traits<SM80_16x8x16_F32BF16BF16F32_TN>>();
  compare_mma<MMA_Traits<SM80_16x8x16_F32F16F16F32_TN>>();
  using Load = Copy_Traits<SM75_U32x4_LDSM_N>;
  using LoadTransposed = Copy_Traits<SM75_U16x8_LDSM_T>;
  using Store = Copy_Traits<SM90_U32x4_STSM_N>;
  compare_matrices("ldmatrix", Load::SrcLayout{}, Load::DstLayout{}, false);
  compare_matrices("ldmatrix.trans", LoadTransposed::SrcLayout{}, LoadTransposed::DstLayout{}, true);
  compare_matrices("stmatrix", Store::DstLayout{}, Store::SrcLayout{}, false);
}

int main() {
  compare_fragments();
  compare_tile<64, 64>();
  compare_tile<64, 128>();
  compare_tile<64, 256>();
  compare_tile<192, 64>();
  compare_tile<128, 64>();
  compare_tile<128, 128>();
  compare_tile<128, 256>();
  compare_tile<80, 256>();
  compare_tile<192, 128, cute::float_e4m3_t>();
  compare_tile<128, 128, cute::float_e4m3_t>();
  compare_tile<128, 256, cute::float_e4m3_t>();
  compare_tile<256, 128, cute::float_e4m3_t>();
  std::printf("%d compared, %d differ\n", compared, differences);
  return differences != 0;
}
