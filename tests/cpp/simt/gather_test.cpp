// SPDX-License-Identifier: Apache-2.0
// The adjoint's kernel against plain loops.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "support/effort.h"
#include "support/oracle.h"
#include "support/problem.h"
#include "support/runner.h"

namespace segscatter::testing {
namespace {

// The nearest number with `digits` binary digits and exponents from `least` on, ties to even.
double round_to(double value, int digits, int least) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int unit = std::max(std::ilogb(value), least) - (digits - 1);
  return std::ldexp(std::nearbyint(std::ldexp(value, -unit)), unit);
}

// The bit pattern of a source element in the type of the result; float64 goes to 16 bits by way of float32, as in
// torch.
std::uint64_t encode(FloatType type, double value) {
  if (type == FloatType::kFloat64) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
  }
  auto narrow = static_cast<float>(value);
  if (type == FloatType::kFloat16) {
    const std::uint64_t sign = std::signbit(narrow) ? 0x8000 : 0;
    if (std::isnan(narrow)) return sign | 0x7fff;
    const double magnitude = std::fabs(round_to(narrow, 11, -14));
    if (magnitude > 65504) return sign | 0x7c00;
    if (magnitude < std::ldexp(1, -14)) return sign | static_cast<std::uint64_t>(std::ldexp(magnitude, 24));
    const int exponent = std::ilogb(magnitude);
    return sign | static_cast<std::uint64_t>(exponent + 15) << 10 |
           (static_cast<std::uint64_t>(std::ldexp(magnitude, 10 - exponent)) & 0x3ff);
  }
  if (type == FloatType::kBFloat16) narrow = static_cast<float>(round_to(narrow, 8, -126));
  std::uint32_t bits;
  std::memcpy(&bits, &narrow, sizeof(bits));
  return type == FloatType::kBFloat16 ? bits >> 16 : bits;
}

void check(const Problem& problem, How how, int schedules) {
  const std::vector<std::uint64_t> first = run_gather(problem, how);
  for (int i = 1; i < schedules; ++i) {
    how.schedule = how.schedule * 31 + i;
    ASSERT_TRUE(run_gather(problem, how) == first) << "schedule " << how.schedule << " gives other bits";
  }
  const std::vector<bool> live = token_liveness(problem);
  const bool sorted = problem.sorted();
  const std::vector<std::int64_t> groups =
      sorted ? token_groups(problem) : std::vector<std::int64_t>(problem.num_tokens, -1);
  for (std::int64_t k = 0; k < problem.num_rows; ++k) {
    for (std::int64_t t = 0; t < problem.num_tokens; ++t) {
      const std::uint64_t got = first[k * problem.num_tokens + t];
      if (!live[t]) {
        ASSERT_EQ(got, 0u) << "dead token " << t << " of row " << k;
      } else if (sorted) {
        const double source = groups[t] < 0 ? 0 : problem.old_sums[k * problem.num_groups + groups[t]];
        const std::uint64_t want = encode(problem.value_type, source);
        const bool both_nan =
            std::isnan(decode(problem.value_type, want)) && std::isnan(decode(problem.value_type, got));
        ASSERT_TRUE(got == want || both_nan)
            << "token " << t << " of row " << k << ": got " << decode(problem.value_type, got) << ", want "
            << decode(problem.value_type, want) << " (" << source << ")";
      }
    }
  }
}

void fill_source(Rng& rng, Problem& problem) {
  const double full_nan = std::nan("0xfffffffffffff");  // rounding must not carry out of its mantissa
  problem.old_sums.resize(problem.num_rows * problem.num_groups);
  for (double& source : problem.old_sums) {
    source = std::ldexp(std::normal_distribution<double>(0, 1)(rng), static_cast<int>(uniform(rng, -30, 20)));
    if (uniform(rng, 0, 7) == 0) {
      source =
          choose<double>(rng, {0.0, -0.0, std::numeric_limits<double>::quiet_NaN(),
                               std::numeric_limits<double>::infinity(), -1e30, 65519.0, 65520.0, full_nan, -full_nan});
    }
    if (problem.sum_type == FloatType::kFloat32) source = static_cast<float>(source);
  }
}

Problem random_problem(Rng& rng, std::int64_t max_tokens, Documents kind) {
  Problem p;
  p.value_type = choose(rng, {FloatType::kFloat16, FloatType::kBFloat16, FloatType::kFloat32, FloatType::kFloat64});
  p.sum_type = choose(rng, {FloatType::kFloat32, FloatType::kFloat64});
  p.mask_type = choose(rng, {MaskType::kNone, MaskType::kUInt8, MaskType::kInt8, MaskType::kInt32, MaskType::kInt64,
                             MaskType::kFloat32});
  p.ignore_index = choose<std::int64_t>(rng, {0, 0, -100, 7});
  p.offset_type = choose(rng, {IndexType::kInt32, IndexType::kInt64});
  p.id_type = choose(rng, {IndexType::kInt32, IndexType::kInt64});
  p.num_rows = choose<std::int64_t>(rng, {1, 1, 2, 3, 0});
  p.misalignment = choose<std::size_t>(rng, {0, 0, 1, 4, 8});
  p.num_tokens = uniform(rng, 0, 1) ? uniform(rng, 0, max_tokens)
                                    : choose<std::int64_t>(rng, {0, 1, 8, 255, 256, 257, 1024, max_tokens});
  p.num_groups = choose<std::int64_t>(rng, {0, 1, 2, 8, 100, 70000});
  p.offsets = make_offsets(rng, kind, p.num_tokens);
  if (p.offset_type == IndexType::kInt32) {
    for (std::int64_t& offset : p.offsets) {
      offset = std::clamp<std::int64_t>(offset, std::numeric_limits<std::int32_t>::min(),
                                        std::numeric_limits<std::int32_t>::max());
    }
  }
  p.identity = uniform(rng, 0, 3) == 0;
  if (p.identity) {
    p.num_groups = p.num_segments();
  } else {
    p.ids = make_ids(rng, static_cast<Ids>(uniform(rng, 0, kIdKinds - 1)), p.num_segments(), p.num_groups);
  }
  fill_tokens(rng, p, choose(rng, {0.3, 1.0}));
  fill_source(rng, p);
  return p;
}

TEST(Gather, RandomProblems) {
  for (int round = 0; round < rounds(250, 24); ++round) {
    Rng rng(round);
    const auto kind = static_cast<Documents>(round % kDocumentKinds);
    const Problem p = random_problem(rng, 4000, kind);
    SCOPED_TRACE("round " + std::to_string(round) + ", " + p.describe());
    check(p, {choose(rng, {turing(), hopper()}), {}, static_cast<std::uint64_t>(round)}, 2);
    if (HasFatalFailure()) return;
  }
}

// All documents of up to 5 tokens and 2 documents, each with a mask of its own.
TEST(Gather, AllSmallProblems) {
  const int stride = std::max(1, 100 / std::min(effort(), 100));
  int number = 0;
  for (std::int64_t tokens = 0; tokens <= 5; ++tokens) {
    for (std::int64_t a = 0; a <= tokens; ++a) {
      for (std::int64_t b = a; b <= tokens; ++b) {
        for (std::int64_t c = b; c <= tokens; ++c) {
          if (++number % stride != 0) continue;
          Rng rng(number);
          Problem p;
          p.num_tokens = tokens;
          p.num_groups = 2;
          p.offsets = {a, b, c};
          p.ids = {uniform(rng, -1, 1), uniform(rng, 0, 2)};
          p.mask_type = MaskType::kUInt8;
          fill_tokens(rng, p, 0.7);
          fill_source(rng, p);
          SCOPED_TRACE(p.describe());
          check(p, {hopper(), {}, static_cast<std::uint64_t>(number)}, 1);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Gather, ContextParallel) {
  for (int round = 0; round < rounds(30, 2); ++round) {
    Rng rng(round);
    const auto layout = choose(rng, {ContextParallelLayout::kPerDocument, ContextParallelLayout::kPerSequence,
                                     ContextParallelLayout::kContiguous});
    const std::int64_t ranks = choose<std::int64_t>(rng, {1, 2, 4});
    const std::int64_t total = 2 * ranks * uniform(rng, 1, 400);
    Problem p = random_problem(rng, 10, Documents::kOne);
    p.num_tokens = total / ranks;
    p.offsets = make_offsets(rng, Documents::kRandom, total);
    p.offset_type = IndexType::kInt64;
    if (layout == ContextParallelLayout::kPerDocument) {
      for (std::int64_t& offset : p.offsets) offset = offset / (2 * ranks) * (2 * ranks);
    }
    p.identity = false;
    p.num_groups = 9;
    p.ids = make_ids(rng, Ids::kSomeOutside, p.num_segments(), p.num_groups);
    p.layout = layout;
    p.ranks = ranks;
    p.rank = uniform(rng, 0, ranks - 1);
    fill_tokens(rng, p, 0.7);
    fill_source(rng, p);
    SCOPED_TRACE("round " + std::to_string(round) + ", " + p.describe());
    check(p, {hopper(), {}, static_cast<std::uint64_t>(round)}, 1);
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace segscatter::testing
