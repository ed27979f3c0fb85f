// The layout of a tile in shared memory. TMA writes it and wgmma reads it. A panel has rows of 128 bytes: 64 columns of 16
// bits, or 128 columns of 8 bits, in the 128-byte swizzle. Row r of each 8 rows has its pieces of 16 bytes in the order
// piece ^ r. Panels start at multiples of 1024 bytes.
#pragma once

#include <cstdint>

#include "../../core/host_device.h"

namespace flash_attn_ext::cuda::sm90 {

// kPanelColumns: of 16-bit elements.
constexpr int kPanelColumns = 64, kPanelRowBytes = 128, kSwizzleBytes = 8 * kPanelRowBytes;

// `columns`, rounded up to whole panels.
constexpr int whole_panels(int columns, int panel_columns = kPanelColumns) {
  return (columns + panel_columns - 1) / panel_columns * panel_columns;
}

template <class In, int kRows_, int kColumns_>
struct alignas(kSwizzleBytes) Panels {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kBytes = sizeof(In), kColumnsOfPanel = kPanelRowBytes / kBytes;
  static_assert(kBytes <= 2 && kRows % 8 == 0 && kColumns % kColumnsOfPanel == 0);
  static constexpr int kCount = kColumns / kColumnsOfPanel, kPanelBytes = kRows * kPanelRowBytes;
  unsigned char bytes[kCount][kPanelBytes];

  // The offset of an element in bytes.
  FA_HOST_DEVICE static constexpr int offset(int row, int column) {
    const int byte = column % kColumnsOfPanel * kBytes;
    return column / kColumnsOfPanel * kPanelBytes + row * kPanelRowBytes + (byte / 16 ^ row % 8) * 16 +
           byte % 16;
  }
};

// wgmma's descriptor of a matrix in shared memory, in units of 16 bytes: start, distance between panels ("leading"),
// distance between groups of 8 rows ("stride"), swizzle.
FA_HOST_DEVICE constexpr uint64_t matrix_descriptor(uint32_t address, uint32_t panel_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroup = uint64_t{kSwizzleBytes / 16} << 32;
  return kSwizzle128 | kGroup | (panel_bytes / 16 << 16) + address / 16;
}

// The descriptor of a matrix that starts `bytes` later. Only its lower half changes, because the field of the start
// cannot overflow.
FA_HOST_DEVICE constexpr uint64_t step_descriptor(uint64_t descriptor, uint32_t bytes) {
  return (descriptor & 0xffffffff00000000u) | static_cast<uint32_t>(descriptor + bytes / 16);
}

// The descriptor of a tile at `address` for a product along its columns, S = Q K^T. columns_step(k) is the offset of
// the k-th 32 bytes of each row: 16 columns of 16 bits or 32 columns of 8 bits.
FA_HOST_DEVICE constexpr uint64_t along_columns(uint32_t address) { return matrix_descriptor(address, 16); }
template <class Tile>
FA_HOST_DEVICE constexpr uint32_t columns_step(int k) {
  constexpr int kSteps = kPanelRowBytes / 32;
  return k / kSteps * Tile::kPanelBytes + k % kSteps * 32;
}

template <class Tile>
FA_HOST_DEVICE constexpr uint64_t along_columns(uint32_t address, int k) {
  return step_descriptor(along_columns(address), columns_step<Tile>(k));
}

// The same for a product along its rows, O = P V.
template <class Tile>
FA_HOST_DEVICE constexpr uint64_t along_rows(uint32_t address) {
  return matrix_descriptor(address, Tile::kPanelBytes);
}
// The offset of the columns from `column` on, a multiple of 8. A product may begin within a panel, because the swizzle
// depends on the address only.
template <class Tile>
FA_HOST_DEVICE constexpr uint32_t first_column(int column) {
  return column / kPanelColumns * Tile::kPanelBytes + column % kPanelColumns * 2;
}
FA_HOST_DEVICE constexpr uint32_t rows_step(int k) { return k * 16 * kPanelRowBytes; }
template <class Tile>
FA_HOST_DEVICE constexpr uint64_t along_rows(uint32_t address, int k) {
  return step_descriptor(along_rows<Tile>(address), rows_step(k));
}

}  // namespace flash_attn_ext::cuda::sm90
