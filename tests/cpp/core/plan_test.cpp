// SPDX-License-Identifier: Apache-2.0
// The launch plan as a function of numbers: what every plan has to keep, where the paths change, what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "segscatter/plan.h"

namespace segscatter::core::test {
namespace {

constexpr CudaDevice kTuring{75, 64 << 10, 1};
constexpr CudaDevice kAmpere{80, 163 << 10, 1};
constexpr CudaDevice kHopper{90, 227 << 10, 16};
constexpr CudaDevice kSmallClusters{120, 99 << 10, 8};
constexpr CudaDevice kDevices[] = {kTuring, kAmpere, kHopper, kSmallClusters};

ReduceSizes sizes(std::int64_t tokens, std::int64_t segments, std::int64_t groups, std::int64_t rows = 1,
                  bool has_ids = true) {
  return {tokens, segments, groups, rows, has_ids};
}

std::string describe(const ReduceSizes& s, const CudaDevice& device) {
  return "T " + std::to_string(s.num_tokens) + ", S " + std::to_string(s.num_segments) + ", G " +
         std::to_string(s.num_groups) + ", K " + std::to_string(s.num_rows) + (s.has_group_ids ? "" : ", no ids") +
         ", compute capability " + std::to_string(device.compute_capability);
}

/// Parts of the workspace as [begin, end) in bytes; empty parts are left out.
std::vector<std::pair<std::size_t, std::size_t>> workspace_parts(const ReducePlan& plan, const ReduceSizes& s) {
  const std::size_t rows = std::max<std::int64_t>(s.num_rows, 1);
  const std::size_t chunks = plan.chunks;
  std::vector<std::pair<std::size_t, std::size_t>> parts;
  const auto add = [&](std::size_t begin, std::size_t bytes) {
    if (bytes) parts.emplace_back(begin, begin + bytes);
  };
  if (plan.path == ReducePath::kTwoLaunches) {
    add(plan.workspace.sums, rows * s.num_groups * chunks * 8);
    add(plan.workspace.counts, s.num_groups * chunks * 4);
  } else if (plan.path == ReducePath::kDocuments) {
    const std::size_t warps = chunks * plan.launches[0].block / 32;
    add(plan.workspace.sums, rows * warps * 8);
    add(plan.workspace.counts, warps * 4);
    add(plan.workspace.document_sums, rows * s.num_segments * 8);
    add(plan.workspace.document_counts, s.num_segments * 4);
    add(plan.workspace.unsorted, chunks * 4);
  }
  return parts;
}

void check(const ReducePlan& plan, const ReduceSizes& s, const CudaDevice& device) {
  SCOPED_TRACE(describe(s, device));
  ASSERT_TRUE(plan.status.ok()) << plan.status.message;
  ASSERT_LE(plan.num_launches, 2);
  if (!s.num_groups) {
    EXPECT_EQ(plan.num_launches, 0);
    return;
  }
  ASSERT_GE(plan.num_launches, 1);
  EXPECT_EQ(plan.num_launches == 1, plan.path == ReducePath::kOneLaunch || plan.chunks == 0);

  for (int i = 0; i < plan.num_launches; ++i) {
    const KernelLaunch& launch = plan.launches[i];
    EXPECT_GE(launch.grid, 1);
    EXPECT_LE(launch.grid, 0x7fffffff);
    EXPECT_TRUE(launch.block % 32 == 0 && launch.block <= 1024) << launch.block;
    EXPECT_LE(launch.shared_bytes, device.shared_memory_per_block);
    EXPECT_LE(launch.cluster, std::max(device.max_cluster_blocks, 1));
    EXPECT_EQ(launch.grid % launch.cluster, 0);
    EXPECT_EQ(launch.dependent, i == 1 && device.compute_capability >= 90);
  }

  // Every token has a chunk, every chunk tokens, and no chunk so many that its count would not fit 32 bits.
  if (plan.chunks) {
    const std::int64_t chunk = std::int64_t{plan.launches[0].block / 32} * plan.warp_tokens;
    EXPECT_EQ(plan.warp_tokens % 256, 0);
    EXPECT_LE(chunk, 1 << 24);
    EXPECT_GE(plan.chunks * chunk, s.num_tokens);
    if (plan.path != ReducePath::kOneLaunch) {
      EXPECT_LT((plan.chunks - 1) * chunk, s.num_tokens);
    }
    EXPECT_EQ(plan.launches[0].grid, std::max<std::int64_t>(s.num_rows, 1) * plan.chunks);
  } else {
    EXPECT_EQ(s.num_tokens, 0);
  }

  auto parts = workspace_parts(plan, s);
  std::sort(parts.begin(), parts.end());
  std::size_t free_from = 0;
  for (const auto& [begin, end] : parts) {
    EXPECT_EQ(begin % 16, 0u);
    EXPECT_GE(begin, free_from);
    free_from = end;
  }
  EXPECT_LE(free_from, plan.workspace.bytes);
  if (plan.path == ReducePath::kOneLaunch) {
    EXPECT_EQ(plan.workspace.bytes, 0u);
  }

  if (plan.chunks && plan.path != ReducePath::kDocuments) {
    EXPECT_LE(plan.shared.entries + plan.launches[0].block / 32 * plan.shared.warp_entries,
              plan.launches[0].shared_bytes);
    const std::int64_t entry = plan.private_entries ? 32 * 12 : 12;
    EXPECT_GE(plan.shared.warp_entries, (s.num_groups + 1) * entry);
    EXPECT_TRUE(plan.shared.entries % 16 == 0 && plan.shared.warp_entries % 512 == 0);
  }
}

TEST(PlanReduce, KeepsEveryLimitForAllSizes) {
  for (const CudaDevice& device : kDevices) {
    for (const std::int64_t tokens :
         {0LL, 1LL, 255LL, 2048LL, 2049LL, 32768LL, 65537LL, 131072LL, 1LL << 24, (1LL << 31) + 5, 1LL << 36}) {
      for (const std::int64_t segments : {0LL, 1LL, 128LL, 131072LL, 1LL << 30}) {
        for (const std::int64_t groups : {0LL, 1LL, 16LL, 17LL, 28LL, 29LL, 768LL, 769LL, 16384LL, 1LL << 30}) {
          for (const std::int64_t rows : {0LL, 1LL, 4LL}) {
            for (const bool has_ids : {true, false}) {
              const ReduceSizes s = sizes(tokens, segments, groups, rows, has_ids);
              check(plan_reduce(s, device), s, device);
            }
          }
        }
      }
    }
  }
}

TEST(PlanReduce, KeepsEveryLimitOnForcedPaths) {
  for (const CudaDevice& device : kDevices) {
    for (const std::int64_t tokens : {0LL, 1LL, 5000LL, 131072LL, 1LL << 24}) {
      for (const std::int64_t groups : {1LL, 8LL, 60LL, 300LL}) {
        const ReduceSizes s = sizes(tokens, 1000, groups, 2);
        for (const ReducePath path : {ReducePath::kOneLaunch, ReducePath::kTwoLaunches, ReducePath::kDocuments}) {
          const ReducePlan plan = plan_reduce(s, device, {path, 0});
          check(plan, s, device);
          EXPECT_EQ(plan.path, path);
        }
        for (int cluster = 1; cluster <= device.max_cluster_blocks; cluster *= 2) {
          const ReducePlan plan = plan_reduce(s, device, {ReducePath::kAutomatic, cluster});
          check(plan, s, device);
          EXPECT_EQ(plan.launches[0].cluster, cluster);
        }
      }
    }
  }
}

TEST(PlanReduce, ChoosesByTokensAndGroups) {
  const auto path = [](std::int64_t tokens, std::int64_t groups, const CudaDevice& device, bool has_ids = true) {
    return plan_reduce(sizes(tokens, 1000, groups, 1, has_ids), device).path;
  };
  EXPECT_EQ(path(4096, 8, kHopper), ReducePath::kOneLaunch);
  EXPECT_EQ(path(131072, 8, kHopper), ReducePath::kTwoLaunches);
  EXPECT_EQ(path(131072, 768, kHopper), ReducePath::kTwoLaunches);
  EXPECT_EQ(path(131072, 769, kHopper), ReducePath::kDocuments);
  EXPECT_EQ(path(131072, 1000, kHopper, false), ReducePath::kDocuments);
  EXPECT_EQ(path(131072, 8, kHopper, false), ReducePath::kTwoLaunches);
  EXPECT_EQ(path(16384, 8, kAmpere), ReducePath::kOneLaunch);
  EXPECT_EQ(path(16385, 8, kAmpere), ReducePath::kTwoLaunches);

  // A cluster grows with the row, up to what the device can place.
  const auto cluster = [](std::int64_t tokens, const CudaDevice& device) {
    return plan_reduce(sizes(tokens, 10, 8), device).launches[0].cluster;
  };
  int last = 1;
  for (const std::int64_t tokens : {1, 2048, 2049, 4096, 4097, 8192, 8193, 32768, 32769, 65536}) {
    EXPECT_GE(cluster(tokens, kHopper), last);
    last = cluster(tokens, kHopper);
  }
  EXPECT_EQ(last, 16);
  EXPECT_EQ(cluster(32768, kSmallClusters), 8);
  EXPECT_EQ(path(65536, 8, kSmallClusters), ReducePath::kTwoLaunches);
}

/// What decides the last bits of the sums, so that they are the same on every GPU.
TEST(PlanReduce, ChunksDependOnTheTokensOnly) {
  for (const std::int64_t tokens : {1LL, 131072LL, 1LL << 22, (1LL << 33) + 1}) {
    for (const ReducePath path : {ReducePath::kTwoLaunches, ReducePath::kDocuments}) {
      const ReducePlan want = plan_reduce(sizes(tokens, 1, 1), kTuring, {path, 0});
      for (const CudaDevice& device : kDevices) {
        const ReducePlan plan = plan_reduce(sizes(tokens, 5000, 100, 3), device, {path, 0});
        EXPECT_EQ(plan.chunks, want.chunks);
        EXPECT_EQ(plan.warp_tokens, want.warp_tokens);
      }
    }
  }
}

TEST(PlanReduce, RefusesWhatNoKernelServes) {
  const auto message = [](const ReduceSizes& s, const LaunchChoice& choice = {}, const CudaDevice& device = kHopper) {
    const ReducePlan plan = plan_reduce(s, device, choice);
    EXPECT_EQ(plan.status.code, Status::Code::kInvalidArgument);
    return std::string(plan.status.message);
  };
  const ReduceSizes fine = sizes(1000, 10, 8);
  EXPECT_EQ(message(sizes(-1, 1, 1)), "sizes must not be negative");
  EXPECT_EQ(message(sizes(1, 1, 1, -1)), "sizes must not be negative");
  EXPECT_EQ(message(fine, {ReducePath::kOneLaunch, 3}), "cluster_blocks must be 0, 1, 2, 4, 8 or 16");
  EXPECT_EQ(message(fine, {ReducePath::kOneLaunch, -1}), "cluster_blocks must be 0, 1, 2, 4, 8 or 16");
  EXPECT_EQ(message(fine, {ReducePath::kOneLaunch, 2}, kAmpere),
            "this device does not place clusters of so many blocks");
  EXPECT_EQ(message(sizes(1000, 10, 20000), {ReducePath::kOneLaunch, 0}), "too many groups or tokens for one launch");
  EXPECT_EQ(message(sizes(1LL << 40, 10, 8), {ReducePath::kOneLaunch, 0}), "too many groups or tokens for one launch");
  EXPECT_EQ(message(sizes(1000, 10, 20000), {ReducePath::kTwoLaunches, 0}),
            "too many groups for sums in shared memory");
  EXPECT_EQ(message(sizes(1000, 1LL << 31, 20000)), "more than 2^31 - 16 segments with so many groups");
  EXPECT_EQ(message(sizes(1LL << 36, 10, 8, 1 << 22)), "sizes need a grid of more than 2^31 - 1 blocks");
  EXPECT_EQ(message(sizes(1000, 10, INT64_MAX)), "sizes need a grid of more than 2^31 - 1 blocks");
}

TEST(PlanGather, KeepsEveryLimit) {
  for (const CudaDevice& device : kDevices) {
    for (const std::int64_t tokens : {0LL, 1LL, 131072LL, (1LL << 31) + 5, 1LL << 36}) {
      for (const std::int64_t rows : {0, 1, 4}) {
        const GatherPlan plan = plan_gather({tokens, 1000, 8, rows}, device);
        ASSERT_TRUE(plan.status.ok());
        EXPECT_EQ(plan.num_launches, tokens && rows ? 1 : 0);
        if (!plan.num_launches) continue;
        const std::int64_t chunk = std::int64_t{plan.launch.block / 32} * plan.warp_tokens;
        const std::int64_t chunks = plan.launch.grid / rows;
        EXPECT_EQ(plan.launch.grid % rows, 0);
        EXPECT_GE(chunks * chunk, tokens);
        EXPECT_LT((chunks - 1) * chunk, tokens);
        EXPECT_LE(plan.launch.shared_bytes, device.shared_memory_per_block);
      }
    }
  }
}

TEST(PlanGather, RefusesWhatTheKernelDoesNotServe) {
  EXPECT_STREQ(plan_gather({-1, 1, 1, 1}, kHopper).status.message, "sizes must not be negative");
  EXPECT_STREQ(plan_gather({1, 1, 1LL << 31, 1}, kHopper).status.message, "more than 2^31 - 16 groups");
  EXPECT_STREQ(plan_gather({1LL << 36, 1, 1, 1 << 22}, kHopper).status.message,
               "sizes need a grid of more than 2^31 - 1 blocks");
}

}  // namespace
}  // namespace segscatter::core::test
