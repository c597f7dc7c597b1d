// SPDX-License-Identifier: Apache-2.0
// What core.h promises, beyond right sums: order-independent bits, untouched dead tokens, errors, garbage.
#include <algorithm>
#include <limits>
#include <random>

#include "cpu/half.h"
#include "reduce.h"

namespace segscatter::core::test {
namespace {

std::vector<CpuCapability> capabilities() {
  std::vector<CpuCapability> all{CpuCapability::kDefault};
  for (const CpuCapability c : {CpuCapability::kAvx2, CpuCapability::kAvx512}) {
    if (c <= cpu_capability()) all.push_back(c);
  }
  return all;
}

Problem random_problem(unsigned seed, std::int64_t tokens, std::int64_t segments, std::int64_t groups) {
  std::mt19937_64 random(seed);
  Problem p;
  p.rows = 2;
  p.groups = groups;
  p.identity = groups == segments;
  for (std::int64_t i = 0; i < p.rows * tokens; ++i) {
    p.values.push_back(std::ldexp(static_cast<float>(random() % 100000) - 50000.0f, static_cast<int>(random() % 40)));
  }
  for (std::int64_t i = 0; i <= segments; ++i) p.offsets.push_back(static_cast<std::int64_t>(random() % (tokens + 1)));
  std::sort(p.offsets.begin(), p.offsets.end());
  for (std::int64_t i = 0; i < segments; ++i) p.ids.push_back(static_cast<std::int64_t>(random() % (groups + 1)) - 1);
  for (std::int64_t i = 0; i < tokens; ++i) p.mask.push_back(random() % 3 != 0);
  return p;
}

TEST(Reduce, SameBitsForEveryInstructionSetAndWorkerCount) {
  unsigned seed = 0;
  for (const std::int64_t tokens : {1000, 16384, 16385, 60000}) {
    for (const std::int64_t segments : {1, 7, 900, 9000}) {
      for (const std::int64_t groups : {std::int64_t{5}, std::int64_t{6000}, segments}) {
        const Problem p = random_problem(++seed, tokens, segments, groups);
        const Result expected = reduce(p, CpuCapability::kDefault);
        for (const CpuCapability capability : capabilities()) {
          for (const int workers : {1, 2, 3}) {
            EXPECT_EQ(reduce(p, capability, threads(workers)), expected) << "seed " << seed;
          }
        }
      }
    }
  }
}

/// Every way that documents of some length go, over the border of two chunks. What belongs to group 0 is NaN: a kernel
/// that reads past a document's end must not use what it finds.
TEST(Reduce, DocumentsOfAnyLength) {
  unsigned seed = 1000;
  for (const std::int64_t length : {1, 2, 4, 8, 12, 14, 40, 250, 300, 3000}) {
    for (const std::int64_t groups : {std::int64_t{2}, std::int64_t{32}, std::int64_t{33}, std::int64_t{5000}}) {
      Problem p = random_problem(++seed, 16384 + 77, (16384 + 77) / length, groups);
      Result expected{std::vector<double>(static_cast<std::size_t>(p.rows * groups), 0.0),
                      std::vector<std::int64_t>(static_cast<std::size_t>(groups), 0)};
      for (float& value : p.values) value = static_cast<float>(seed++ % 7);
      for (std::int64_t d = 0; d < p.segments(); ++d) {
        const std::size_t at = static_cast<std::size_t>(d);
        const std::int64_t group = p.ids[at];
        for (std::int64_t t = p.offsets[at]; t < p.offsets[at + 1]; ++t) {
          for (std::int64_t row = 0; row < p.rows; ++row) {
            float& value = p.values[static_cast<std::size_t>(row * p.tokens() + t)];
            if (group == 0) value = std::numeric_limits<float>::quiet_NaN();
            if (group > 0 && p.mask[static_cast<std::size_t>(t)]) {
              expected.sums[static_cast<std::size_t>(row * groups + group)] += value;
            }
          }
          if (group >= 0) expected.counts[static_cast<std::size_t>(group)] += p.mask[static_cast<std::size_t>(t)];
        }
      }
      for (const CpuCapability capability : capabilities()) {
        Result result = reduce(p, capability, threads(2));
        for (std::int64_t row = 0; row < p.rows; ++row) {
          double& sum = result.sums[static_cast<std::size_t>(row * groups)];
          EXPECT_EQ(std::isnan(sum), expected.counts[0] > 0);
          sum = 0.0;
        }
        EXPECT_EQ(result, expected) << length << " tokens, " << groups << " groups";
      }
    }
  }
}

TEST(Reduce, DeadTokensAreNeverUsed) {
  for (const CpuCapability capability : capabilities()) {
    for (std::int64_t tokens = 1; tokens < 70; ++tokens) {
      Problem p;
      p.groups = 1;
      p.offsets = {0, tokens};
      p.ids = {0};
      for (std::int64_t t = 0; t < tokens; ++t) {
        const bool live = t % 3 == 0;
        p.mask.push_back(live);
        p.values.push_back(live         ? 1.0f
                           : t % 3 == 1 ? std::numeric_limits<float>::quiet_NaN()
                                        : std::numeric_limits<float>::infinity());
      }
      const Result result = reduce(p, capability);
      EXPECT_EQ(result.sums[0], static_cast<double>((tokens + 2) / 3));
      EXPECT_EQ(result.counts[0], (tokens + 2) / 3);
    }
  }
}

TEST(Reduce, GarbageStaysInBounds) {
  std::mt19937_64 random(7);
  const std::int64_t extremes[] = {std::numeric_limits<std::int64_t>::min(),
                                   std::numeric_limits<std::int64_t>::max(),
                                   -1,
                                   0,
                                   17,
                                   std::int64_t{1} << 40};
  for (int round = 0; round < 300; ++round) {
    Problem p = random_problem(static_cast<unsigned>(round), 20000, 40, round % 2 ? 5000 : 40);
    for (std::int64_t& x : p.offsets) {
      x = random() % 3 ? static_cast<std::int64_t>(random() % 20000) : extremes[random() % 6];
    }
    for (std::int64_t& x : p.ids) x = random() % 3 ? static_cast<std::int64_t>(random() % 6) : extremes[random() % 6];
    for (const CpuCapability capability : capabilities()) {
      EXPECT_EQ(reduce(p, capability, threads(2)), reduce(p, CpuCapability::kDefault)) << "round " << round;
    }
  }
}

TEST(Reduce, ReportsMistakes) {
  ReduceArgs args;
  args.num_tokens = -1;
  EXPECT_EQ(reduce_cpu(args, nullptr, 0).code, Status::Code::kInvalidArgument);
  args = {};
  args.sum_type = FloatType::kFloat16;
  EXPECT_EQ(reduce_cpu(args, nullptr, 0).code, Status::Code::kInvalidArgument);
  args = {};
  args.segments.num_segments = 2;
  args.segments.num_groups = 3;
  EXPECT_EQ(reduce_cpu(args, nullptr, 0).code, Status::Code::kInvalidArgument);
  args = {};
  args.num_tokens = 1;
  const std::int64_t id = 0;
  args.segments.group_ids = {&id, IndexType::kInt64};
  args.segments.num_segments = args.segments.num_groups = 1;
  const Status status = reduce_cpu(args, nullptr, 1);
  EXPECT_EQ(status.code, Status::Code::kWorkspaceTooSmall);
  EXPECT_STREQ(status.message, "reduce_cpu: workspace is smaller than reduce_cpu_workspace() says");
}

TEST(Reduce, WorkspaceIsBounded) {
  const std::int64_t id = 0;
  ReduceArgs args;
  args.segments.group_ids = {&id, IndexType::kInt64};
  args.num_tokens = std::int64_t{1} << 31;
  args.segments.num_segments = std::int64_t{1} << 20;
  for (const std::int64_t groups : {8, 4096, 4097, 1 << 20}) {
    args.segments.num_groups = groups;
    EXPECT_LT(reduce_cpu_workspace(args, threads(2)), std::size_t{80} << 20) << groups;
  }
}

TEST(Half, ConvertsEveryNumber) {
  using detail::BFloat16;
  using detail::Float16;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 half{static_cast<std::uint16_t>(bits)};
    const std::uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    const double value = detail::to_double(half);
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), fraction != 0);
      EXPECT_EQ(std::isinf(value), fraction == 0);
    } else {
      const double expected = exponent ? std::ldexp(1024.0 + fraction, static_cast<int>(exponent) - 25)
                                       : std::ldexp(static_cast<double>(fraction), -24);
      EXPECT_EQ(value, sign * expected);
    }
    if (!std::isnan(value)) {
      EXPECT_EQ(detail::to_float16(static_cast<float>(value)).bits, bits);
    }
    const double wide = detail::to_double(BFloat16{static_cast<std::uint16_t>(bits)});
    if (!std::isnan(wide)) {
      EXPECT_EQ(detail::to_bfloat16(static_cast<float>(wide)).bits, bits);
    }
  }
}

TEST(Half, RoundsToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7bff; ++bits) {  // between each finite half and the next
    const auto at = [](std::uint32_t b) {
      return static_cast<float>(detail::to_double(detail::Float16{static_cast<std::uint16_t>(b)}));
    };
    const float low = at(bits), high = at(bits + 1), middle = (low + high) / 2;
    EXPECT_EQ(detail::to_float16(std::nextafter(middle, low)).bits, bits);
    EXPECT_EQ(detail::to_float16(std::nextafter(middle, high)).bits, bits + 1);
    EXPECT_EQ(detail::to_float16(middle).bits, bits + (bits & 1));
  }
  EXPECT_EQ(detail::to_float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(detail::to_float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(detail::to_float16(std::numeric_limits<float>::quiet_NaN()).bits & 0x7fff, 0x7e00);
  EXPECT_EQ(detail::to_bfloat16(1.00390625f).bits, 0x3f80);  // a tie, to the even neighbour
  EXPECT_EQ(detail::to_bfloat16(1.01171875f).bits, 0x3f82);
  EXPECT_EQ(detail::to_bfloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
}

TEST(Gather, WritesEveryTokenOnce) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 100; ++round) {
    const Problem p =
        random_problem(static_cast<unsigned>(round), 1 + static_cast<std::int64_t>(random() % 40000), 30, 4);
    std::vector<float> source(8), out(p.values.size() + 1, -7.0f);
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>(i + 1);
    GatherArgs args{source.data(), FloatType::kFloat32, 2, p.tokens(), segments_of(p, whole_row(p)), mask_of(p),
                    out.data(),    FloatType::kFloat32};
    ASSERT_TRUE(gather_cpu(args, threads(2)).ok());
    for (std::int64_t t = 0; t < p.tokens(); ++t) {
      std::int64_t group = -1;
      for (std::int64_t d = 0; d < p.segments(); ++d) {
        const std::size_t at = static_cast<std::size_t>(d);
        if (p.offsets[at] <= t && t < p.offsets[at + 1]) group = p.ids[at];
      }
      if (!p.mask[static_cast<std::size_t>(t)]) group = -1;
      for (std::int64_t row = 0; row < 2; ++row) {
        const float expected = group < 0 ? 0.0f : source[static_cast<std::size_t>(row * 4 + group)];
        ASSERT_EQ(out[static_cast<std::size_t>(row * p.tokens() + t)], expected) << "round " << round << " token " << t;
      }
    }
    EXPECT_EQ(out.back(), -7.0f);
  }
}

}  // namespace
}  // namespace segscatter::core::test
