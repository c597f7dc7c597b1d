// SPDX-License-Identifier: Apache-2.0
// The order in which sums are made, written down as plain loops. The kernels must give these bits and no others: they
// depend on the number of tokens, the path, the size of the cluster, and whether every lane has entries of its own.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "support/effort.h"
#include "support/oracle.h"
#include "support/problem.h"
#include "support/runner.h"

namespace segscatter::testing {
namespace {

using core::ReducePath;
using core::ReducePlan;

// Knuth's TwoSum, the errors summed apart.
struct Pair {
  float high = 0, low = 0;
  void add(float x) {
    const float sum = high + x;
    const float x_in_sum = sum - high;
    const float error = (high - (sum - x_in_sum)) + (x - x_in_sum);
    low += error;
    high = sum;
  }
  void add(const Pair& other) {
    add(other.high);
    low += other.low;
  }
};

// Lane l of a butterfly adds what lane l ^ distance has, for distances 16, 8, 4, 2, 1; lane 0 has the result.
Pair butterfly(std::vector<Pair> lanes) {
  for (int distance = 16; distance != 0; distance /= 2) {
    const std::vector<Pair> before = lanes;
    for (int lane = 0; lane < 32; ++lane) lanes[lane].add(before[lane ^ distance]);
  }
  return lanes[0];
}

// The second of two launches: thread t adds up chunks t, t + threads, ..., then warps and block add up their threads.
Pair combined(const std::vector<Pair>& chunks, int threads) {
  std::vector<Pair> sums(threads);
  for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk) sums[chunk % threads].add(chunks[chunk]);
  Pair total;
  for (int warp = 0; warp < threads / 32; ++warp) {
    const Pair sum = butterfly({sums.begin() + 32 * warp, sums.begin() + 32 * (warp + 1)});
    if (warp == 0) {
      total = sum;
    } else {
      total.add(sum);
    }
  }
  return total;
}

double value(const Pair& sum) {
  return static_cast<double>(sum.high) + static_cast<double>(sum.low);
}

// Sums by group where every lane has sums of its own: each lane adds its tokens in order (8 consecutive ones of every
// row of 256), then the block adds up its warps' lanes, then the chunks are added up.
std::vector<double> sums_in_order(const Problem& problem, const ReducePlan& plan) {
  const std::vector<std::int64_t> groups = token_groups(problem);
  const std::vector<bool> live = token_liveness(problem);
  const int warps = plan.launches[0].block / 32;
  std::vector<double> result;
  for (std::int64_t group = 0; group < problem.num_groups; ++group) {
    std::vector<Pair> chunks(plan.chunks);
    for (std::int64_t chunk = 0; chunk < plan.chunks; ++chunk) {
      std::vector<std::vector<Pair>> lanes(warps, std::vector<Pair>(32));  // [warp][lane]
      for (int warp = 0; warp < warps; ++warp) {
        const std::int64_t begin = (chunk * warps + warp) * plan.warp_tokens;
        for (std::int64_t t = begin; t < begin + plan.warp_tokens && t < problem.num_tokens; ++t) {
          if (groups[t] != group || !live[t]) continue;
          lanes[warp][(t - begin) / 8 % 32].add(static_cast<float>(decode(FloatType::kFloat32, problem.values[t])));
        }
      }
      // Lane 16 * i + j begins with lanes 2 * j and 2 * j + 1 of warp i, and goes on with every second warp.
      std::vector<Pair> sums(32);
      for (int lane = 0; lane < 32; ++lane) {
        for (int warp = lane / 16; warp < warps; warp += 2) {
          sums[lane].add(lanes[warp][lane % 16 * 2]);
          sums[lane].add(lanes[warp][lane % 16 * 2 + 1]);
        }
      }
      chunks[chunk] = butterfly(sums);
    }
    Pair total;
    if (plan.path == ReducePath::kOneLaunch) {
      for (const Pair& chunk : chunks) total.add(chunk);
    } else {
      total = combined(chunks, plan.launches[1].block);
    }
    result.push_back(value(total));
  }
  return result;
}

TEST(Order, PrivateEntries) {
  for (int round = 0; round < rounds(40, 4); ++round) {
    Rng rng(round);
    Problem p;
    p.num_tokens = uniform(rng, 1, effort() < 5 ? 3000 : 12000);
    p.num_groups = uniform(rng, 1, 16);
    p.offsets = make_offsets(rng, static_cast<Documents>(round % 10), p.num_tokens);
    p.ids = make_ids(rng, Ids::kSomeOutside, p.num_segments(), p.num_groups);
    p.mask_type = MaskType::kUInt8;
    p.sum_type = FloatType::kFloat64;
    fill_tokens(rng, p, 0.5);
    for (const core::LaunchChoice choice :
         {core::LaunchChoice{ReducePath::kTwoLaunches, 0}, core::LaunchChoice{ReducePath::kOneLaunch, 1},
          core::LaunchChoice{ReducePath::kOneLaunch, 4}}) {
      if (choice.cluster_blocks == 4 && effort() < 5) continue;
      const ReducePlan plan = core::plan_reduce(sizes_of(p), hopper(), choice);
      ASSERT_TRUE(plan.status.ok());
      ASSERT_TRUE(plan.private_entries);
      SCOPED_TRACE("round " + std::to_string(round) + ", " + p.describe());
      const ReduceResult got = run_reduce(p, {hopper(), choice, static_cast<std::uint64_t>(round)});
      const std::vector<double> want = sums_in_order(p, plan);
      for (std::size_t g = 0; g < want.size(); ++g) {
        ASSERT_EQ(got.sums[g], want[g]) << "group " << g << ", path " << int(plan.path) << ", cluster "
                                        << choice.cluster_blocks;
      }
    }
  }
}

// The second launch alone, for few chunks and for many (a wider block), on sums by chunk that are made up.
TEST(Order, Combination) {
  for (const std::int64_t tokens : {5000, 2048 * 32, 2048 * 128, 2048 * 129, 2048 * 600}) {
    Rng rng(tokens);
    Problem p;
    p.num_tokens = tokens;
    p.num_groups = 3;
    p.num_rows = 2;
    const core::ReduceSizes sizes{tokens, 1, p.num_groups, p.num_rows, true};
    const ReducePlan plan = core::plan_reduce(sizes, hopper(), {ReducePath::kTwoLaunches, 0});
    ASSERT_TRUE(plan.status.ok());
    std::vector<std::uint64_t> workspace(plan.workspace.bytes / 8 + 1);
    auto* bytes = reinterpret_cast<unsigned char*>(workspace.data());
    std::vector<double> want, sums(6, NAN);
    std::vector<std::int64_t> want_counts(3, 0), counts(3, -1);
    for (std::int64_t i = 0; i < 6; ++i) {
      std::vector<Pair> chunks(plan.chunks);
      for (Pair& chunk : chunks) {
        chunk.high = std::normal_distribution<float>(0, 1e4f)(rng);
        chunk.low = std::normal_distribution<float>(0, 1e-4f)(rng);
      }
      std::memcpy(bytes + plan.workspace.sums + i * plan.chunks * sizeof(Pair), chunks.data(),
                  chunks.size() * sizeof(Pair));
      want.push_back(value(combined(chunks, plan.launches[1].block)));
    }
    for (std::int64_t i = 0; i < 3 * plan.chunks; ++i) {
      const auto count = static_cast<std::uint32_t>(rng());
      std::memcpy(bytes + plan.workspace.counts + i * sizeof(count), &count, sizeof(count));
      want_counts[i / plan.chunks] += count;
    }
    core::ReduceArgs args;
    args.num_rows = p.num_rows;
    args.num_tokens = tokens;
    args.segments.num_segments = 1;
    args.segments.num_groups = p.num_groups;
    args.segments.map = core::make_offset_map(ContextParallelLayout::kNone, 1, 0, tokens);
    args.sums = sums.data();
    args.sum_type = FloatType::kFloat64;
    args.counts = counts.data();
    simt::run({reduce_launches(args, plan, bytes)[1]}, 9);
    EXPECT_EQ(sums, want) << plan.chunks << " chunks";
    EXPECT_EQ(counts, want_counts) << plan.chunks << " chunks";
  }
}

}  // namespace
}  // namespace segscatter::testing
