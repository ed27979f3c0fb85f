// The layouts and descriptors of csrc/cuda/sm90/panels.h, element by element against CuTe's. Prints
// differences.
#include <cstdint>
#include <cstdio>

#define CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED 1
// Shared memory is this array here, so that a descriptor's address is an offset into it.
alignas(1024) static unsigned char shared_bytes[128 << 10];
static size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - shared_bytes;
}

#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "cuda/sm90/panels.h"

using namespace cute;
namespace sm90 = flash_attn_ext::cuda::sm90;
using Element = cute::bfloat16_t;

static int differences = 0, compared = 0;

static void compare(const char* what, int rows, int columns, int at, uint64_t ours, uint64_t theirs) {
  ++compared;
  if (ours == theirs) return;
  ++differences;
  std::printf("%s of %d x %d, %d: ours %llx, CuTe's %llx\n", what, rows, columns, at,
              (unsigned long long)ours, (unsigned long long)theirs);
}

template <int kRows, int kColumns>
void compare_tile() {
  using Tile = sm90::Panels<Element, kRows, kColumns>;
  const auto layout =
      tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<Element>{}, Shape<Int<kRows>, Int<kColumns>>{});
  const auto in_elements = as_position_independent_swizzle_layout(layout);
  for (int row = 0; row < kRows; ++row)
    for (int column = 0; column < kColumns; ++column)
      compare("element", kRows, kColumns, row * kColumns + column, Tile::offset(row, column),
              in_elements(row, column) * sizeof(Element));

  auto* start = reinterpret_cast<Element*>(shared_bytes);
  const auto tile = make_tensor(make_smem_ptr(start), layout);
  for (int k = 0; k < kColumns / 16; ++k) {
    const auto part = local_tile(tile, Shape<Int<kRows>, _16>{}, make_coord(0, k));
    compare("descriptor along columns", kRows, kColumns, k, sm90::along_columns<Tile>(0, k),
            SM90::GMMA::make_gmma_desc<SM90::GMMA::Major::K>(part).desc_);
  }
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

int main() {
  compare_tile<64, 64>();
  compare_tile<64, 128>();
  compare_tile<64, 256>();
  compare_tile<192, 64>();
  compare_tile<128, 64>();
  compare_tile<128, 128>();
  compare_tile<128, 256>();
  compare_tile<80, 256>();
  std::printf("%d compared, %d differ\n", compared, differences);
  return differences != 0;
}
