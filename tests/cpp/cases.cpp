// The list of cases. Each tile edge and each option occurs at least once alone, and at least once with other
// options.
#include <algorithm>
#include <set>

#include "case.h"
#include "cpu/target_region.h"

#define FA_ISA_NAME "generic"
#define FA_VECTOR_BYTES 16
#define FA_VECTOR_REGISTERS 16

namespace test {
namespace {

// Includes the kernels' tile sizes, so that the sizes below are at the edges of tiles.
#include "cpu/kernels/tiling-inl.h"

constexpr int64_t kBlockQ = forward_tiling<float>().block_q, kBlockK = forward_tiling<float>().block_k;
constexpr int64_t kBackwardQ = backward_tiling<float>().block_q,
                  kBackwardK = backward_tiling<float>().block_k;

const Layout kContiguous{}, kUnaligned{1, 0, false, false}, kGaps{0, 9, false, false},
    kUnalignedGaps{3, 9, false, false}, kHeadsInnermost{1, 9, true, false};
const Layout kLayouts[] = {kContiguous, kUnaligned, kGaps, kUnalignedGaps, kHeadsInnermost};

const char* fill_name(MaskFill fill) {
  return fill == MaskFill::kBlocks ? "blocks" : fill == MaskFill::kScattered ? "scattered" : "nothing masked";
}

std::string text(int64_t n) { return std::to_string(n); }

// Collects cases. add() returns the new case, and the caller changes it.
class List {
 public:
  Case& add(const std::string& group, const Sizes& z, const Layout& layout = kGaps) {
    Case c;
    c.sizes = z;
    c.layout = layout;
    c.name = group + ", B " + text(z.batch) + " H " + text(z.heads) + "/" + text(z.heads_kv) + " S " +
             text(z.seqlen_q) + "x" + text(z.seqlen_k) + " D " + text(z.head_dim) + "/" + text(z.head_dim_v);
    cases.push_back(c);
    return cases.back();
  }

  std::vector<Case> cases;
};

void lengths(List& list) {
  std::vector<std::array<int64_t, 2>> pairs = {{1, 1},   {1, 2},   {2, 1},   {2, 3}, {3, 2},
                                               {1, 130}, {130, 1}, {2, 200}, {97, 3}};
  for (const int64_t q : {kBlockQ, kBackwardQ})
    for (const int64_t near_q : {q - 1, q, q + 1})
      for (const int64_t k : std::set<int64_t>{kBlockK, 2 * kBlockK, kBackwardK})  // twice: with AVX-512
        for (const int64_t near_k : {k - 1, k, k + 1}) pairs.push_back({near_q, near_k});
  for (size_t n = 0; n < pairs.size(); ++n)
    list.add("lengths", {1, 2, 2, pairs[n][0], pairs[n][1], 8, 8}, kLayouts[n % 5]);
}

void head_dims(List& list) {
  // Below, at and above whole vectors of 128, 256 and 512 bits; unequal dimensions; the largest dimension.
  const int64_t dims[][2] = {{1, 1},   {2, 3},   {3, 2},   {5, 7},     {8, 15},   {15, 8},    {16, 16},
                             {17, 33}, {31, 17}, {32, 32}, {33, 1},    {48, 49},  {1, 64},    {64, 64},
                             {65, 63}, {80, 40}, {96, 96}, {128, 128}, {256, 31}, {512, 512}, {511, 5}};
  int n = 0;
  for (const auto& [d, d_v] : dims) {
    const int64_t rows = d + d_v > 600 ? 5 : 50;
    list.add("head dims", {1, 1, 1, rows, 66, d, d_v}, kLayouts[n++ % 5]);
  }
}

void bands(List& list) {
  struct {
    const char* name;
    bool causal;
    int64_t left, right;
  } const windows[] = {{"causal", true, -1, -1},     {"causal window 5", true, 5, -1},
                       {"window 0+0", false, 0, 0},  {"window 70+3", false, 70, 3},
                       {"window -+2", false, -1, 2}, {"window 9+-", false, 9, -1}};
  const int64_t lengths[][2] = {{70, 70}, {49, 130}, {130, 49}, {1, 67}, {67, 1}};
  for (const auto& w : windows)
    for (const bool lower_right : {false, true})
      for (const auto& [q, k] : lengths) {
        if (q == k && lower_right) continue;
        Case& c = list.add(std::string(w.name) + (lower_right ? " lower right" : ""), {1, 2, 1, q, k, 8, 9});
        c.causal = w.causal;
        c.left = w.left;
        c.right = w.right;
        c.lower_right = lower_right;
      }
}

Case& add_mask(List& list, const std::string& group, const Mask& mask, const Sizes& sizes) {
  std::string name = group + "mask " + name_of(mask.dtype) + " " + fill_name(mask.fill) + " (";
  for (const auto& [has, letter] :
       {std::pair{mask.per_batch, 'B'}, {mask.per_head, 'H'}, {mask.per_row, 'Q'}, {mask.per_col, 'K'}})
    name += has ? letter : '1';
  Case& c = list.add(name + ")", sizes);
  c.mask = mask;
  return c;
}

void masks(List& list) {
  const Sizes sizes{2, 2, 1, 50, 70, 8, 8};
  const DType all[] = {DType::kBool, DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16};
  for (int broadcast = 0; broadcast < 16; ++broadcast) {
    Mask mask{DType::kFloat32,  !(broadcast & 1),     !(broadcast & 2), !(broadcast & 4),
              !(broadcast & 8), MaskFill::kScattered, kUnalignedGaps};
    add_mask(list, "broadcast ", mask, sizes);
  }
  for (const DType dtype : all) {
    add_mask(list, "every dtype, ", {dtype, true, true, true, true, MaskFill::kScattered, kUnaligned}, sizes);
    add_mask(list, "row of ", {dtype, false, true, false, true, MaskFill::kScattered, kUnaligned}, sizes);
    add_mask(list, "column of ", {dtype, true, false, true, false, MaskFill::kScattered, kUnaligned}, sizes);
    const Layout transposed{1, 9, false, true};
    add_mask(list, "transposed ", {dtype, false, true, true, true, MaskFill::kScattered, transposed}, sizes);
  }
  for (const DType dtype : {DType::kBool, DType::kFloat32}) {
    const Sizes large{2, 2, 2, 70, 130, 9, 8}, one_row{2, 2, 2, 1, 130, 8, 9};
    Mask mask{dtype, true, true, true, true, MaskFill::kBlocks, kUnaligned};
    add_mask(list, "fully masked rows and tiles, ", mask, large);
    add_mask(list, "fully masked, causal, ", mask, large).causal = true;
    mask.fill = MaskFill::kNothingMasked;
    add_mask(list, "", mask, large);
    add_mask(list, "one query, ", mask, one_row);
  }
}

void score_options(List& list) {
  const Sizes sizes{2, 2, 2, 65, 67, 17, 8};
  list.add("softcap", sizes).softcap = 1.5;
  list.add("alibi (H)", sizes).slopes = Slopes::kPerHead;
  list.add("alibi (B, H)", sizes).slopes = Slopes::kPerBatchAndHead;
  list.add("large scores", sizes).scale = 2;
  list.add("negative scale", sizes).scale = -0.5;
  list.add("no dlse", sizes).dlse = false;
  list.add("dout expanded from one row", sizes).expanded_dout = true;
  for (const double p : {0.1, 0.5, 1.0}) {
    list.add("dropout " + std::to_string(p), sizes).dropout_p = p;
    Case& c = list.add("dropout odd, causal " + std::to_string(p), {1, 3, 1, 131, 97, 8, 3});
    c.dropout_p = p;
    c.causal = true;
  }
  list.add("sink (H)", sizes).sink = Slopes::kPerHead;
  list.add("sink (B, H)", sizes).sink = Slopes::kPerBatchAndHead;
  list.add("sink, few queries", {2, 4, 2, 3, 700, 17, 8}).sink = Slopes::kPerHead;
  Mask rows_without_keys{DType::kBool, true, true, true, true, MaskFill::kBlocks, kUnaligned};
  add_mask(list, "sink, rows without keys, ", rows_without_keys, sizes).sink = Slopes::kPerBatchAndHead;
  Case& c = list.add("softcap, alibi (B, H), causal lower right", {2, 1, 1, 50, 97, 8, 8});
  c.softcap = 1.5;
  c.slopes = Slopes::kPerBatchAndHead;
  c.causal = c.lower_right = true;
}

void grouped_heads(List& list) {
  // At and above 8 tasks (batch x heads), the backward no longer cuts the keys of a head in chunks.
  const Sizes sizes[] = {{1, 2, 1, 49, 200, 8, 8}, {1, 3, 1, 3, 130, 8, 5}, {2, 4, 2, 20, 130, 9, 8},
                         {3, 6, 3, 17, 65, 5, 8},  {1, 8, 8, 2, 129, 3, 4}, {3, 3, 3, 65, 130, 8, 8}};
  for (const Sizes& z : sizes) {
    list.add("grouped heads", z, kHeadsInnermost);
    list.add("grouped heads, causal", z, kUnaligned).causal = true;
  }
}

// Few queries: split keys, grouped heads, every kind of tail. Also many queries with the decode kernel forced.
void decode(List& list) {
  const int64_t groups[][2] = {{1, 1}, {2, 1}, {3, 1}, {5, 1}, {8, 2}};
  const int64_t lengths[][2] = {{1, 1}, {1, 17}, {1, 700}, {2, 129}, {3, 64}, {8, 300}, {60, 140}};
  int n = 0;
  for (const auto& [heads, heads_kv] : groups)
    for (const auto& [q, k] : lengths)
      for (const int64_t splits : {0, 2}) {
        const int64_t d = std::array<int64_t, 4>{8, 17, 33, 128}[n % 4];
        Case& c = list.add("decode, splits " + text(splits), {1, heads, heads_kv, q, k, d, d + n % 3 - 1},
                           kLayouts[n % 5]);
        c.decode.num_splits = splits;
        c.causal = c.lower_right = n % 2 == 0;
        c.poison = n % 3 == 0 ? Poison::kHidden : Poison::kNowhere;
        ++n;
      }
  for (const double unified : {0.0, 1000.0}) {
    Mask mask{DType::kFloat32, true, false, true, true, MaskFill::kBlocks, kUnalignedGaps};
    Case& c = add_mask(list, "decode, unified maximum, ", mask, {2, 4, 2, 3, 200, 17, 9});
    c.decode = {3, true, unified};
    c.softcap = 2;
    c.slopes = c.sink = Slopes::kPerBatchAndHead;
    c.dropout_p = 0.3;
  }
}

// All options together, with every combination of gradients.
void together(List& list) {
  const Sizes sizes{2, 4, 2, 50, 97, 17, 9};
  auto add = [&](const std::string& name, const Wanted& wanted) {
    Mask mask{DType::kFloat32, true, false, true, true, MaskFill::kBlocks, kUnalignedGaps};
    Case& c = add_mask(list, "everything, " + name + ", ", mask, sizes);
    c.layout = kUnalignedGaps;
    c.lower_right = true;
    c.left = 60;
    c.right = 20;
    c.softcap = 2;
    c.slopes = c.sink = Slopes::kPerBatchAndHead;
    c.dropout_p = 0.3;
    c.wanted = wanted;
  };
  add("all gradients", {true, true, true, true, true, true});
  add("no gradient", {false, false, false, false, false, false});
  add("dq only", {true, false, false, false, false, false});
  add("dk only", {false, true, false, false, false, false});
  add("dv only", {false, false, true, false, false, false});
  add("dmask only", {false, false, false, true, false, false});
  add("dslopes only", {false, false, false, false, true, false});
  add("dsink only", {false, false, false, false, false, true});
  add("all but dq", {false, true, true, true, true, true});
  add("all but dmask", {true, true, true, false, true, true});
}

void poisoned(List& list) {
  for (const Poison poison : {Poison::kHidden, Poison::kSeen}) {
    const std::string name = poison == Poison::kHidden ? "NaN hidden, " : "NaN seen by some, ";
    // A causal band hides early rows (lower right) or late keys (upper left).
    for (const bool lower_right : {false, true}) {
      const int64_t q = lower_right ? 130 : 67, k = lower_right ? 67 : poison == Poison::kSeen ? 67 : 130;
      Case& c = list.add(name + (lower_right ? "causal lower right" : "causal"), {2, 4, 2, q, k, 8, 16});
      c.causal = true;
      c.lower_right = lower_right;
      c.poison = poison;
    }
    for (const DType dtype : {DType::kBool, DType::kFloat32})
      for (const double softcap : {0.0, 2.0}) {
        Mask mask{dtype, true, true, true, true, MaskFill::kBlocks, kUnaligned};
        const int64_t d = softcap > 0 ? 33 : 8, d_v = softcap > 0 ? 8 : 33;
        Case& c = add_mask(list, name + (softcap > 0 ? "softcap, " : ""), mask, {2, 2, 2, 67, 70, d, d_v});
        c.softcap = softcap;
        c.poison = poison;
      }
  }
}

Case& add_packed(List& list, const std::string& name, const Packing::Lengths& lengths, int64_t heads,
                 int64_t heads_kv, int64_t d, int64_t d_v) {
  Sizes z{static_cast<int64_t>(lengths.size()), heads, heads_kv, 0, 0, d, d_v};
  for (const auto& [q, k] : lengths) {
    z.seqlen_q = std::max(z.seqlen_q, q);
    z.seqlen_k = std::max(z.seqlen_k, k);
  }
  Case& c = list.add("packed, " + name, z);
  c.packing.emplace();
  c.packing->rows = lengths;
  return c;
}

// Packed sequences: without rows, single rows, decoded and not decoded sequences in one batch, tile edges.
void packed(List& list) {
  const Packing::Lengths lengths = {{70, 130}, {1, 64}, {0, 5},   {129, 3},
                                    {7, 0},    {65, 0}, {8, 300}, {48, 65}};
  int n = 0;
  for (const bool causal : {false, true})
    for (const bool lower_right : {false, true})
      for (const auto& [heads, heads_kv] : {std::array<int64_t, 2>{1, 1}, {4, 2}, {3, 3}}) {
        Case& c =
            add_packed(list, std::string(causal ? "causal" : "full") + (lower_right ? " lower right" : ""),
                       lengths, heads, heads_kv, 17, 8);
        c.causal = causal;
        c.lower_right = lower_right;
        c.layout = kLayouts[n % 5];
        c.packing->int64_offsets = n++ % 2 == 0;
      }
  add_packed(list, "one sequence", {{131, 200}}, 2, 1, 8, 16).causal = true;
  add_packed(list, "all few", {{1, 700}, {3, 64}, {1, 1}, {8, 0}, {0, 0}, {2, 65}}, 4, 1, 33, 8);
  {
    Case& c = add_packed(list, "splits asked for", lengths, 4, 2, 8, 8);
    c.decode.num_splits = 3;
    c.causal = c.lower_right = true;
  }
  {
    Case& c = add_packed(list, "rows in use", lengths, 4, 2, 8, 8);
    c.packing->used = {{70, 100}, {1, 64}, {0, 5}, {60, 2}, {0, 0}, {65, 0}, {3, 300}, {48, 0}};
    c.causal = c.lower_right = true;
  }
  for (const bool by_row : {false, true})
    for (int broadcast = 0; broadcast < 8; ++broadcast) {
      if (by_row && broadcast & 1) continue;
      Case& c = add_packed(list, "mask " + text(by_row) + text(broadcast),
                           {{70, 70}, {1, 66}, {50, 3}, {0, 2}}, 4, 2, 9, 8);
      c.mask = Mask{DType::kFloat32,
                    by_row || !(broadcast & 1),
                    !(broadcast & 2),
                    by_row || !(broadcast & 4),
                    true,
                    MaskFill::kScattered,
                    kUnalignedGaps};
      c.packing->mask_by_row = by_row;
    }
  for (const bool by_row : {false, true}) {
    Case& c = add_packed(list, "everything, mask by row " + text(by_row),
                         {{70, 97}, {5, 200}, {0, 7}, {66, 50}}, 4, 2, 17, 9);
    c.mask = Mask{DType::kFloat32, true, false, true, true, MaskFill::kBlocks, kUnalignedGaps};
    c.packing->mask_by_row = by_row;
    c.lower_right = true;
    c.left = 60;
    c.right = 20;
    c.softcap = 2;
    c.slopes = Slopes::kPerBatchAndHead;
    c.dropout_p = 0.3;
    c.layout = kUnalignedGaps;
  }
  const std::vector<int64_t> hostile[] = {
      {0, 70, 20, 120}, {-5, 10, 500, 90}, {120, 80, 40, 0}, {0, 0, 0, 1 << 30}};
  for (const std::vector<int64_t>& offsets : hostile) {
    Case& c = add_packed(list, "hostile offsets from " + text(offsets[0]), {{40, 40}, {40, 40}, {40, 40}}, 2,
                         1, 8, 8);
    c.causal = c.lower_right = true;
    c.packing->hostile = offsets;
  }
}

// Keys and values in caches: one cache per sequence, and pages that end anywhere in a tile.
void caches(List& list) {
  const Packing::Lengths lengths = {{1, 130}, {3, 64}, {0, 5}, {50, 200}, {7, 0}, {65, 65}};
  int n = 0;
  for (const int64_t page_size : {0, 1, 7, 16, 64, 300})
    for (const bool causal : {false, true}) {
      const int64_t d = n % 2 ? 17 : 32;
      Case& c = add_packed(list, "cache, pages " + text(page_size) + (causal ? ", causal" : ""), lengths, 4,
                           2, d, d - n % 3);
      c.packing->page_size = page_size;
      c.packing->int64_offsets = n % 3 == 0;
      c.causal = c.lower_right = causal;
      c.layout = kLayouts[n++ % 5];
    }
  const std::vector<int64_t> hostile[] = {{-1}, {1 << 30}, {0, -7, 99999}};
  for (const std::vector<int64_t>& pages : hostile) {
    Case& c = add_packed(list, "hostile pages from " + text(pages[0]), lengths, 2, 1, 8, 8);
    c.packing->page_size = 16;
    c.packing->hostile_pages = pages;
  }
}

}  // namespace

std::vector<Case> all_cases() {
  List list;
  lengths(list);
  head_dims(list);
  bands(list);
  masks(list);
  score_options(list);
  grouped_heads(list);
  decode(list);
  together(list);
  poisoned(list);
  packed(list);
  caches(list);
  return list.cases;
}

}  // namespace test
