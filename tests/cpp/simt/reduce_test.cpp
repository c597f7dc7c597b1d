// SPDX-License-Identifier: Apache-2.0
// The reduction's kernels against plain loops: every path, many shapes, several schedules each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "csrc/core/cuda/policy.h"
#include "support/effort.h"
#include "support/oracle.h"
#include "support/problem.h"
#include "support/runner.h"

namespace segscatter::testing {
namespace {

using core::CudaDevice;
using core::LaunchChoice;
using core::ReducePath;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Way {
  const char* name;
  LaunchChoice choice;
};
constexpr Way kWays[] = {
    {"cluster of 1", {ReducePath::kOneLaunch, 1}}, {"cluster of 2", {ReducePath::kOneLaunch, 2}},
    {"cluster of 8", {ReducePath::kOneLaunch, 8}}, {"two launches", {ReducePath::kTwoLaunches, 0}},
    {"documents", {ReducePath::kDocuments, 0}},
};
constexpr int kWayCount = 5;

bool possible(const Problem& problem, const How& how) {
  return core::plan_reduce(sizes_of(problem), how.device, how.choice).status.ok();
}

void expect_right(const Problem& problem, const ReduceResult& got, const Sums& want) {
  ASSERT_EQ(got.counts.size(), want.counts.size());
  ASSERT_EQ(got.sums.size(), want.sums.size());
  for (std::size_t g = 0; g < want.counts.size(); ++g) {
    ASSERT_EQ(got.counts[g], want.counts[g]) << "count of group " << g;
  }
  for (std::size_t i = 0; i < want.sums.size(); ++i) {
    const std::string wrong = compare_sum(problem.sum_type, got.sums[i], want.sums[i], want.magnitude[i]);
    ASSERT_TRUE(wrong.empty()) << "row " << i / problem.num_groups << ", group " << i % problem.num_groups << ": "
                               << wrong;
  }
}

// One way under several schedules: all must give the same bits, and those must be right if anything is.
void check(const Problem& problem, How how, int schedules) {
  const ReduceResult first = run_reduce(problem, how);
  if (problem.sorted()) expect_right(problem, first, expected_sums(problem));
  for (int i = 1; i < schedules; ++i) {
    how.schedule = how.schedule * 31 + i;
    ASSERT_TRUE(run_reduce(problem, how) == first) << "schedule " << how.schedule << " gives other bits";
  }
}

// With little effort to spend, one way after another instead of all.
void check_all_ways(const Problem& problem, std::uint64_t schedule, int schedules = 2) {
  static int calls = 0;
  ++calls;
  for (int i = 0; i < kWayCount; ++i) {
    if (effort() < 5 && calls % kWayCount != i) continue;
    const Way& way = kWays[i];
    const How how{hopper(), way.choice, schedule};
    if (!possible(problem, how)) continue;
    SCOPED_TRACE(std::string(way.name) + ", schedule " + std::to_string(schedule) + ", " + problem.describe());
    check(problem, how, effort() < 5 ? 1 : schedules);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

Problem random_problem(Rng& rng, std::int64_t max_tokens) {
  Problem p;
  p.value_type = choose(rng, {FloatType::kFloat16, FloatType::kBFloat16, FloatType::kFloat32, FloatType::kFloat64});
  p.mask_type = choose(rng, {MaskType::kNone, MaskType::kUInt8, MaskType::kUInt8, MaskType::kInt8, MaskType::kInt32,
                             MaskType::kInt64, MaskType::kFloat32});
  p.ignore_index = choose<std::int64_t>(rng, {0, 0, -100, 7, 255, 300, std::int64_t{1} << 40});
  p.offset_type = choose(rng, {IndexType::kInt32, IndexType::kInt64});
  p.id_type = choose(rng, {IndexType::kInt32, IndexType::kInt64});
  p.sum_type = choose(rng, {FloatType::kFloat32, FloatType::kFloat64});
  p.num_rows = choose<std::int64_t>(rng, {1, 1, 1, 0, 2, 3});
  p.row_padding = choose<std::int64_t>(rng, {0, 0, 1, 8, 13});
  p.misalignment = choose<std::size_t>(rng, {0, 0, 0, 1, 4, 8});
  p.num_tokens = choose<std::int64_t>(rng, {0, 1, 7, 8, 255, 256, 257, 1000, 2048, max_tokens});
  if (uniform(rng, 0, 1)) p.num_tokens = uniform(rng, 0, max_tokens);
  p.num_groups = choose<std::int64_t>(rng, {1, 2, 3, 8, 16, 17, 28, 29, 100});
  const auto kind = static_cast<Documents>(uniform(rng, 0, kDocumentKinds - 1));
  p.offsets = make_offsets(rng, kind, p.num_tokens);
  if (p.offset_type == IndexType::kInt32) {
    for (std::int64_t& offset : p.offsets) {
      offset = std::clamp<std::int64_t>(offset, std::numeric_limits<std::int32_t>::min(),
                                        std::numeric_limits<std::int32_t>::max());
    }
  }
  if (uniform(rng, 0, 4) == 0) {
    p.identity = true;
    p.num_groups = std::max<std::int64_t>(0, p.num_segments() + choose<std::int64_t>(rng, {0, 0, -2, 3}));
  } else {
    p.ids = make_ids(rng, static_cast<Ids>(uniform(rng, 0, kIdKinds - 1)), p.num_segments(), p.num_groups);
  }
  fill_tokens(rng, p, choose(rng, {0.25, 0.5, 1.0, 0.0}));
  p.accumulate = uniform(rng, 0, 3) == 0;
  if (p.accumulate) fill_old_results(rng, p);
  return p;
}

// A plain problem: float32, masked by bytes.
Problem simple_problem(Rng& rng, std::int64_t num_tokens, std::vector<std::int64_t> offsets, std::int64_t num_groups) {
  Problem p;
  p.num_tokens = num_tokens;
  p.num_groups = num_groups;
  p.offsets = std::move(offsets);
  p.mask_type = MaskType::kUInt8;
  p.sum_type = FloatType::kFloat64;
  p.ids = make_ids(rng, Ids::kRandom, p.num_segments(), num_groups);
  fill_tokens(rng, p, 0.5);
  return p;
}

TEST(Reduce, RandomProblems) {
  for (int round = 0; round < rounds(350, 12); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Rng rng(round);
    check_all_ways(random_problem(rng, 3000), round, 2);
    if (HasFatalFailure()) return;
  }
}

TEST(Reduce, RandomLongProblems) {
  for (int round = 0; round < rounds(12, 0); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Rng rng(1000 + round);
    check_all_ways(random_problem(rng, 60000), round, 1);
    if (HasFatalFailure()) return;
  }
}

// Every problem of up to 6 tokens and 3 documents: all offsets, all masks, groups drawn from up to 3 and "none".
TEST(Reduce, AllSmallProblems) {
  const int stride = effort() < 5 ? 1000 : 100 / std::min(effort(), 100);
  std::uint64_t number = 0;
  for (std::int64_t tokens = 0; tokens <= 6; ++tokens) {
    for (int segments = 0; segments <= 3; ++segments) {
      std::vector<std::int64_t> offsets(segments + 1, 0);
      for (;;) {
        for (unsigned live = 0; live < 1u << tokens; ++live, ++number) {
          if (number % stride != 0) continue;
          Rng rng(number);
          Problem p;
          p.num_tokens = tokens;
          p.num_groups = uniform(rng, 1, 3);
          p.offsets = offsets;
          for (int d = 0; d < segments; ++d) p.ids.push_back(uniform(rng, -1, p.num_groups - 1));
          p.mask_type = MaskType::kUInt8;
          fill_tokens(rng, p, 1.0);
          for (std::int64_t t = 0; t < tokens; ++t) p.mask[t] = live >> t & 1;
          for (std::int64_t t = 0; t < tokens; ++t) {
            // Distinct powers of two: a sum tells which tokens are in it.
            const float value = live >> t & 1 ? std::ldexp(1.0f, static_cast<int>(t)) : NAN;
            p.values[t] = 0;
            std::memcpy(&p.values[t], &value, sizeof(value));
          }
          const Way& way = kWays[number / stride % kWayCount];
          SCOPED_TRACE(std::string(way.name) + ", live " + std::to_string(live) + ", " + p.describe());
          check(p, How{hopper(), way.choice, number}, 1);
          if (HasFatalFailure()) return;
        }
        // The next non-decreasing offsets.
        int i = segments;
        while (i >= 0 && offsets[i] == tokens) --i;
        if (i < 0) break;
        const std::int64_t next = offsets[i] + 1;
        for (; i <= segments; ++i) offsets[i] = next;
      }
    }
  }
}

// Numbers of tokens and document starts around the edges of lanes, rows, warps' runs and chunks.
TEST(Reduce, Edges) {
  constexpr std::int64_t kRow = core::cuda::kRowTokens;
  std::vector<std::int64_t> edges;
  for (const Way& way : kWays) {
    const core::ReducePlan plan = core::plan_reduce({40 * kRow, 1, 3, 1, true}, hopper(), way.choice);
    ASSERT_TRUE(plan.status.ok());
    edges.insert(edges.end(), {plan.warp_tokens, 2 * plan.warp_tokens, 4 * plan.warp_tokens, 8 * plan.warp_tokens});
  }
  edges.insert(edges.end(), {8, kRow, 2 * kRow, 4 * kRow, 5 * kRow});
  std::sort(edges.begin(), edges.end());
  edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
  int round = 0;
  for (const std::int64_t edge : edges) {
    if (edge > 40 * kRow) continue;
    for (const std::int64_t start : {edge - 1, edge, edge + 1}) {
      for (const std::int64_t tokens : {edge - 1, edge, edge + 1, edge + kRow, 40 * kRow}) {
        if (++round % (effort() < 5 ? 50 : effort() < 50 ? 8 : 2) != 0) continue;
        if (start > tokens) continue;
        Rng rng(round);
        check_all_ways(simple_problem(rng, tokens, {0, start, tokens}, 3), round, 1);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More documents than a window of 32 boundaries, than a search by a warp alone, than the pivots of a block.
TEST(Reduce, NumbersOfDocuments) {
  for (const int documents : {30, 31, 32, 33, 62, 63, 64, 65, 1022, 1023, 1024, 1025, 2047, 2048, 33000}) {
    if (documents > 3000 && effort() < 5) continue;
    Rng rng(documents);
    const std::int64_t tokens = 6000;
    std::vector<std::int64_t> offsets;
    const std::int64_t first = documents % 2 ? 700 : 0;  // with or without tokens before the first document
    for (int d = 0; d < documents; ++d) offsets.push_back(uniform(rng, first, tokens));
    if (first == 0) offsets[0] = 0;
    offsets.push_back(tokens);
    std::sort(offsets.begin(), offsets.end());
    check_all_ways(simple_problem(rng, tokens, offsets, 8), documents, 1);
    if (HasFatalFailure()) return;
  }
}

TEST(Reduce, EmptyDocumentsInOnePlace) {
  for (int round = 0; round < rounds(20, 1); ++round) {
    Rng rng(round);
    Problem p = simple_problem(rng, 3000, make_offsets(rng, Documents::kEmptyRun, 3000), 8);
    check_all_ways(p, round, 1);
    // All of them before the first token, or after the last.
    const std::vector<std::int64_t> zeros(5000, 0), ends(5000, 700);
    std::vector<std::int64_t> offsets{0, 300, 700};
    offsets.insert(round % 2 ? offsets.begin() : offsets.end(), 5000, round % 2 ? 0 : 700);
    check_all_ways(simple_problem(rng, 700, offsets, 8), round, 1);
    if (HasFatalFailure()) return;
  }
}

TEST(Reduce, NoTokensNoDocumentsNoGroups) {
  Rng rng(1);
  for (const std::int64_t tokens : {0, 5}) {
    for (const std::int64_t segments : {0, 3}) {
      for (const std::int64_t groups : {0, 1, 40}) {
        for (const std::int64_t rows : {0, 1, 2}) {
          for (const bool accumulate : {false, true}) {
            if (effort() < 5 && tokens + segments + groups + rows > 5) continue;
            Problem p;
            p.num_tokens = tokens;
            p.num_groups = groups;
            p.num_rows = rows;
            p.offsets.assign(segments + 1, 0);
            if (segments) p.offsets.back() = tokens;
            p.ids = make_ids(rng, Ids::kRandom, segments, groups);
            fill_tokens(rng, p, 1);
            p.accumulate = accumulate;
            fill_old_results(rng, p);
            check_all_ways(p, 3, 1);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// NaN and infinity where a token is live show in its own group only.
// Without value rows there is no address to read them from, however well aligned the one is that stands for it.
TEST(Reduce, CountsAlone) {
  for (int round = 0; round < 2 * kWayCount; ++round) {
    Rng rng(round);
    Problem p = simple_problem(rng, 4000, {0, 700, 700, 2048, 4000}, 3);
    p.num_rows = 0;
    p.misalignment = round / kWayCount;
    fill_tokens(rng, p, 0.5);
    check_all_ways(p, round, 1);
    if (HasFatalFailure()) return;
  }
}

TEST(Reduce, LiveNaNAndInfinity) {
  for (int round = 0; round < rounds(60, 3); ++round) {
    Rng rng(round);
    Problem p = simple_problem(rng, 1500, make_offsets(rng, Documents::kRandom, 1500), 6);
    p.sum_type = choose(rng, {FloatType::kFloat32, FloatType::kFloat64});
    p.value_type = choose(rng, {FloatType::kFloat32, FloatType::kFloat64});
    fill_tokens(rng, p, 0.5);
    for (int i = 0; i < 4; ++i) {
      const double special = choose(rng, {kNaN, kInfinity, -kInfinity});
      const std::int64_t t = uniform(rng, 0, p.num_tokens - 1);
      p.mask[t] = 1;
      p.values[t] = 0;
      if (p.value_type == FloatType::kFloat32) {
        const auto narrow = static_cast<float>(special);
        std::memcpy(&p.values[t], &narrow, sizeof(narrow));
      } else {
        std::memcpy(&p.values[t], &special, sizeof(special));
      }
    }
    check_all_ways(p, round, 1);
    if (HasFatalFailure()) return;
  }
}

// Large numbers among small ones that cancel: only an accumulation as good as float64 passes.
TEST(Reduce, Cancellation) {
  for (int round = 0; round < rounds(20, 1); ++round) {
    Rng rng(round);
    Problem p = simple_problem(rng, 5000, {0, 2500, 5000}, 2);
    p.ids = {0, 0};
    for (std::int64_t t = 0; t < p.num_tokens; ++t) {
      float value = static_cast<float>(std::normal_distribution<double>(0, 1)(rng));
      if (t % 97 == 0) value = t / 97 % 2 ? 3e7f : -3e7f;
      p.mask[t] = 1;
      std::memcpy(&p.values[t], &value, sizeof(value));
    }
    check_all_ways(p, round, 1);
    if (HasFatalFailure()) return;
  }
}

// Offsets and ids that mean nothing: any result, but in bounds, in finite time, and always the same one.
TEST(Reduce, Garbage) {
  for (int round = 0; round < rounds(80, 8); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Rng rng(round);
    Problem p = random_problem(rng, 4000);
    p.identity = round % 4 == 0;
    p.offset_type = IndexType::kInt64;
    p.offsets = make_offsets(rng, Documents::kGarbage, p.num_tokens);
    p.num_groups = p.identity ? p.num_segments() : uniform(rng, 1, 40);
    p.ids.clear();
    if (!p.identity) {
      p.ids = make_ids(rng, Ids::kSomeOutside, p.num_segments(), p.num_groups);
      for (std::int64_t& id : p.ids) {
        if (uniform(rng, 0, 5) == 0) id = static_cast<std::int64_t>(rng());
      }
    }
    fill_old_results(rng, p);
    check_all_ways(p, round, 3);
    if (HasFatalFailure()) return;
  }
}

// Offsets that rise through the same tokens again and again. The windows in which they do not fall look sorted, and
// name the same slots of shared memory.
TEST(Reduce, SawtoothOffsets) {
  for (int round = 0; round < rounds(30, 2 * kWayCount); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Rng rng(round);
    const std::int64_t period = uniform(rng, 40, 200);
    std::vector<std::int64_t> offsets;
    for (int d = 0; d < 1500; ++d) offsets.push_back(d % period);
    check_all_ways(simple_problem(rng, 600, offsets, 5), round, 3);
    if (HasFatalFailure()) return;
  }
}

// Every layout of context parallelism: each rank is right, and the ranks' counts add up to the whole row's.
TEST(Reduce, ContextParallel) {
  for (int round = 0; round < rounds(30, 2); ++round) {
    for (const auto layout : {ContextParallelLayout::kPerDocument, ContextParallelLayout::kPerSequence,
                              ContextParallelLayout::kContiguous}) {
      Rng rng(round);
      const std::int64_t ranks = choose<std::int64_t>(rng, {1, 2, 4, 8});
      const std::int64_t unit = 2 * ranks;
      const std::int64_t total = unit * uniform(rng, 1, 400);
      std::vector<std::int64_t> offsets = make_offsets(
          rng, choose(rng, {Documents::kRandom, Documents::kEmpties, Documents::kGaps, Documents::kOne}), total);
      if (layout == ContextParallelLayout::kPerDocument) {
        for (std::int64_t& offset : offsets) offset = offset / unit * unit;
      }
      Problem p = simple_problem(rng, total / ranks, offsets, 5);
      p.layout = layout;
      p.ranks = ranks;
      p.mask_type = MaskType::kNone;
      std::vector<std::int64_t> counted(p.num_groups, 0), whole(p.num_groups, 0);
      for (std::int64_t d = 0; d < p.num_segments(); ++d) whole[p.ids[d]] += p.offsets[d + 1] - p.offsets[d];
      for (p.rank = 0; p.rank < ranks; ++p.rank) {
        fill_tokens(rng, p, 1);
        const Way& way = kWays[uniform(rng, 0, kWayCount - 1)];
        SCOPED_TRACE(std::string(way.name) + ", " + p.describe());
        const ReduceResult result = run_reduce(p, {hopper(), way.choice, static_cast<std::uint64_t>(round)});
        expect_right(p, result, expected_sums(p));
        if (HasFatalFailure()) return;
        for (std::int64_t g = 0; g < p.num_groups; ++g) counted[g] += result.counts[g];
      }
      EXPECT_EQ(counted, whole) << p.describe();
    }
  }
}

// The example of the contract: 1 to 8, documents [0, 2) and [2, 8), halves of a contiguous layout.
TEST(Reduce, ContractExample) {
  Problem p;
  p.num_tokens = 4;
  p.num_groups = 2;
  p.offsets = {0, 2, 8};
  p.ids = {0, 1};
  p.layout = ContextParallelLayout::kContiguous;
  p.ranks = 2;
  const std::vector<double> sums[] = {{3, 7}, {0, 26}};
  const std::vector<std::int64_t> counts[] = {{2, 2}, {0, 4}};
  for (p.rank = 0; p.rank < 2; ++p.rank) {
    p.values.assign(4, 0);
    for (int t = 0; t < 4; ++t) {
      const auto value = static_cast<float>(4 * p.rank + t + 1);
      std::memcpy(&p.values[t], &value, sizeof(value));
    }
    const ReduceResult result = run_reduce(p, {});
    EXPECT_EQ(result.sums, sums[p.rank]);
    EXPECT_EQ(result.counts, counts[p.rank]);
  }
}

// Groups by the thousand, and one per document.
TEST(Reduce, ManyGroups) {
  for (int round = 0; round < rounds(30, 6); ++round) {
    Rng rng(round);
    const std::int64_t tokens = uniform(rng, 0, 6000);
    const auto kind = choose(rng, {Documents::kRandom, Documents::kShort, Documents::kSingle, Documents::kEmpties,
                                   Documents::kEmptyRun, Documents::kOne, Documents::kRowEdges});
    Problem p = simple_problem(rng, tokens, make_offsets(rng, kind, tokens), 1);
    p.num_rows = choose<std::int64_t>(rng, {1, 1, 2});
    p.value_type = choose(rng, {FloatType::kFloat32, FloatType::kFloat64});
    p.identity = round % 2 != 0;
    p.num_groups = p.identity ? p.num_segments() : choose<std::int64_t>(rng, {300, 512, 513, 1500, 5000});
    p.ids.clear();
    if (!p.identity) {
      p.ids = make_ids(rng, choose(rng, {Ids::kRandom, Ids::kSorted, Ids::kSomeOutside, Ids::kSame}), p.num_segments(),
                       p.num_groups);
    }
    fill_tokens(rng, p, 0.5);
    p.accumulate = uniform(rng, 0, 1);
    fill_old_results(rng, p);
    for (const LaunchChoice choice : {LaunchChoice{}, LaunchChoice{ReducePath::kDocuments, 0}}) {
      SCOPED_TRACE(p.describe());
      check(p, {hopper(), choice, static_cast<std::uint64_t>(round)}, 2);
      if (HasFatalFailure()) return;
    }
  }
}

// Sums by document: documents that span more runs of tokens than a warp has lanes.
TEST(Reduce, LongDocuments) {
  for (int round = 0; round < rounds(4, 1); ++round) {
    Rng rng(round);
    Problem p = simple_problem(rng, 42000, {0, 3, 20000, 20001, 20600, 41990}, 3);
    p.ids = {0, 2, 0, 0, 1};
    p.identity = round % 2 != 0;
    if (p.identity) p.ids.clear(), p.num_groups = p.num_segments();
    SCOPED_TRACE(p.describe());
    check(p, {hopper(), {ReducePath::kDocuments, 0}, static_cast<std::uint64_t>(round + 1)}, 1);
    if (HasFatalFailure()) return;
  }
}

// Many documents of few groups, so that lanes and warps meet the same ones again and again; two value rows, whose
// blocks must not get in each other's way.
TEST(Reduce, ManyDocumentsOfFewGroups) {
  for (int round = 0; round < rounds(8, 1); ++round) {
    Rng rng(round);
    const auto kind = round % 2 ? Documents::kShort : Documents::kSingle;
    Problem p = simple_problem(rng, 2200, make_offsets(rng, kind, 2200), 40);
    p.num_rows = 2;
    fill_tokens(rng, p, 0.8);
    SCOPED_TRACE(p.describe());
    const auto schedule = static_cast<std::uint64_t>(round + 1);
    for (const LaunchChoice choice :
         {LaunchChoice{ReducePath::kOneLaunch, 2}, LaunchChoice{ReducePath::kTwoLaunches, 0},
          LaunchChoice{ReducePath::kDocuments, 0}}) {
      check(p, {hopper(), choice, schedule}, 1);
    }
    p.ids.clear();
    p.identity = true;
    p.num_groups = p.num_segments();
    check(p, {hopper(), {ReducePath::kDocuments, 0}, schedule}, 1);
    if (HasFatalFailure()) return;
  }
}

// What the plan chooses by itself, on every kind of device. By document, all of them give the same bits.
TEST(Reduce, Devices) {
  for (int round = 0; round < rounds(40, 2); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    Rng rng(round);
    Problem p = random_problem(rng, 5000);
    for (const CudaDevice& device : {turing(), ampere(), hopper(), blackwell()}) {
      SCOPED_TRACE("compute capability " + std::to_string(device.compute_capability) + ", " + p.describe());
      check(p, {device, {}, static_cast<std::uint64_t>(round)}, 1);
      if (HasFatalFailure()) return;
    }
    const How by_document{turing(), {ReducePath::kDocuments, 0}, 1};
    EXPECT_TRUE(run_reduce(p, by_document) == run_reduce(p, {hopper(), by_document.choice, 1}));
  }
}

}  // namespace
}  // namespace segscatter::testing
