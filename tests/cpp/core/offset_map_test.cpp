// SPDX-License-Identifier: Apache-2.0
// The offset map against an enumeration of the tokens that each rank holds.
#include <limits>

#include "reduce.h"
#include "segments.h"

namespace segscatter::core::test {
namespace {

using Layout = ContextParallelLayout;

/// Which global tokens a rank holds, from the layouts' definitions.
std::vector<std::int64_t> held(Layout layout, std::int64_t size, std::int64_t rank,
                               const std::vector<std::int64_t>& offsets) {
  std::vector<std::int64_t> tokens;
  const auto two_pieces = [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t piece = (end - begin) / (2 * size);
    for (const std::int64_t index : {rank, 2 * size - 1 - rank}) {
      for (std::int64_t t = 0; t < piece; ++t) tokens.push_back(begin + index * piece + t);
    }
  };
  const std::int64_t total = offsets.back();
  if (layout == Layout::kPerDocument) {
    for (std::size_t d = 0; d + 1 < offsets.size(); ++d) two_pieces(offsets[d], offsets[d + 1]);
  } else if (layout == Layout::kPerSequence) {
    two_pieces(0, total);
  } else {
    for (std::int64_t t = rank * total / size; t < (rank + 1) * total / size; ++t) tokens.push_back(t);
  }
  return tokens;
}

TEST(OffsetMap, AgreesWithTheTokensHeld) {
  for (const Layout layout : {Layout::kNone, Layout::kPerDocument, Layout::kPerSequence, Layout::kContiguous}) {
    for (const std::int64_t size : {1, 2, 3, 4}) {
      if (layout == Layout::kNone && size > 1) continue;
      const std::int64_t unit = 2 * size;
      const std::vector<std::int64_t> offsets{0, 3 * unit, 3 * unit, 4 * unit, 9 * unit};
      for (std::int64_t rank = 0; rank < size; ++rank) {
        const std::vector<std::int64_t> tokens = held(layout, size, rank, offsets);
        const OffsetMap map = make_offset_map(layout, size, rank, static_cast<std::int64_t>(tokens.size()));
        for (const std::int64_t x : offsets) {
          std::int64_t before = 0;
          for (const std::int64_t token : tokens) before += token < x;
          EXPECT_EQ(detail::local_offset(map, x), before)
              << "layout " << static_cast<int>(layout) << " size " << size << " rank " << rank << " offset " << x;
        }
      }
    }
  }
}

TEST(OffsetMap, StaysInRangeForAnyNumber) {
  const std::int64_t least = std::numeric_limits<std::int64_t>::min(), most = std::numeric_limits<std::int64_t>::max();
  for (const Layout layout : {Layout::kNone, Layout::kPerDocument, Layout::kPerSequence, Layout::kContiguous}) {
    const OffsetMap map = make_offset_map(layout, 4, 3, 1000);
    for (const std::int64_t x : {least, least + 1, std::int64_t{-1}, std::int64_t{0}, most - 1, most}) {
      EXPECT_GE(detail::local_offset(map, x), 0);
      EXPECT_LE(detail::local_offset(map, x), 1000);
    }
    EXPECT_EQ(detail::local_offset(map, least), 0);
    EXPECT_EQ(detail::local_offset(map, most), 1000);
  }
}

TEST(SimplifiedMask, MeansTheSame) {
  const int data = 0;
  const auto type = [&](MaskType t, std::int64_t ignore) { return detail::simplify({&data, t, ignore}).type; };
  EXPECT_EQ(type(MaskType::kUInt8, 255), MaskType::kUInt8);
  EXPECT_EQ(type(MaskType::kUInt8, -100), MaskType::kNone);
  EXPECT_EQ(type(MaskType::kUInt8, 256), MaskType::kNone);
  EXPECT_EQ(type(MaskType::kInt8, -128), MaskType::kUInt8);
  EXPECT_EQ(detail::simplify({&data, MaskType::kInt8, -100}).ignore_index, 156);
  EXPECT_EQ(type(MaskType::kInt8, 128), MaskType::kNone);
  EXPECT_EQ(type(MaskType::kInt32, std::int64_t{1} << 31), MaskType::kNone);
  EXPECT_EQ(type(MaskType::kInt32, -(std::int64_t{1} << 31)), MaskType::kInt32);
  EXPECT_EQ(type(MaskType::kInt64, std::numeric_limits<std::int64_t>::min()), MaskType::kInt64);
  EXPECT_EQ(type(MaskType::kFloat32, 1 << 24), MaskType::kFloat32);
  EXPECT_EQ(type(MaskType::kFloat32, (1 << 24) + 1), MaskType::kNone);
  EXPECT_EQ(type(MaskType::kFloat32, std::numeric_limits<std::int64_t>::max()), MaskType::kNone);
}

}  // namespace
}  // namespace segscatter::core::test
