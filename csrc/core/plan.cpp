// SPDX-License-Identifier: Apache-2.0
#include "segscatter/plan.h"

#include <algorithm>
#include <iterator>

#include "csrc/core/cuda/policy.h"

namespace segscatter::core {
namespace {

using namespace cuda;

constexpr std::int64_t kMaxGrid = 0x7fffffff;
constexpr std::int64_t kMaxLabels = 0x7ffffff0;  // groups and documents are numbered with 32 bits in a kernel
constexpr std::int64_t kMaxChunkTokens = std::int64_t{1} << 24;  // a chunk's count, in units of 1/128, fits 32 bits
constexpr int kEntryBytes = 12;                                  // a sum and a count
constexpr int kSumBytes = 8;
constexpr int kCountBytes = 4;

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) {
  return a / b + (a % b != 0);
}
constexpr std::int64_t round_up(std::int64_t a, std::int64_t b) {
  return divide_up(a, b) * b;
}

Status invalid(const char* message) {
  return {Status::Code::kInvalidArgument, message};
}

struct SharedMemory {
  SharedLayout layout;
  std::int64_t bytes = 0;
};

/// Shared memory of a block that keeps sums by group. `cluster` is 0 where nothing comes from other blocks.
SharedMemory shared_memory_for_groups(std::int64_t num_groups, bool private_entries, const KernelPolicy& policy,
                                      int cluster) {
  num_groups = std::min(num_groups, kMaxLabels);  // far more than fit, and nothing below overflows
  const std::int64_t inbox = kPivotBytes + std::int64_t{policy.warps()} * kRowTokens * 2;
  const std::int64_t slots = cluster ? num_groups + cluster : 0;
  const std::int64_t entries = round_up(inbox + slots * kEntryBytes, 16);
  const std::int64_t warp = round_up((num_groups + 1) * (private_entries ? kLanes : 1) * kEntryBytes, kLanes * 16);
  return {{static_cast<int>(inbox), static_cast<int>(entries), static_cast<int>(warp)},
          entries + policy.warps() * warp};
}

/// Tokens of a warp where many blocks share the work.
std::int64_t chunked_warp_tokens(std::int64_t num_tokens, const KernelPolicy& kernel) {
  const ChunkPolicy policy;
  const std::int64_t rows_at_most = policy.max_rows;
  std::int64_t rows = std::clamp(divide_up(num_tokens, policy.tokens_per_step) * policy.min_rows,
                                 std::int64_t{policy.min_rows}, rows_at_most);
  rows = std::max(rows, divide_up(num_tokens, policy.max_chunks * kernel.warps() * kRowTokens));
  return std::min(rows * kRowTokens, kMaxChunkTokens / kernel.warps());
}

/// Gives out consecutive, aligned parts of the workspace.
struct WorkspaceCursor {
  std::size_t bytes = 0;
  std::size_t take(std::int64_t elements, int element_bytes) {
    const std::size_t at = bytes;
    bytes += static_cast<std::size_t>(round_up(elements * element_bytes, 256));
    return at;
  }
};

void plan_one_launch(ReducePlan& plan, const ReduceSizes& sizes, int cluster, const SharedMemory& shared) {
  const std::int64_t rows = divide_up(sizes.num_tokens, std::int64_t{cluster} * kOneLaunchPolicy.warps() * kRowTokens);
  plan.path = ReducePath::kOneLaunch;
  plan.chunks = cluster;
  plan.warp_tokens = static_cast<int>(std::max<std::int64_t>(rows, 1) * kRowTokens);
  plan.shared = shared.layout;
  plan.num_launches = 1;
  plan.launches[0] = {"reduce_cluster",
                      std::max<std::int64_t>(sizes.num_rows, 1) * cluster,
                      kOneLaunchPolicy.threads,
                      cluster,
                      static_cast<int>(shared.bytes),
                      false};
}

void plan_two_launches(ReducePlan& plan, const ReduceSizes& sizes, const PathPolicy& policy,
                       const SharedMemory& shared) {
  const std::int64_t rows = std::max<std::int64_t>(sizes.num_rows, 1);
  const std::int64_t warp_tokens = chunked_warp_tokens(sizes.num_tokens, kPartialPolicy);
  plan.path = ReducePath::kTwoLaunches;
  plan.warp_tokens = static_cast<int>(warp_tokens);
  plan.chunks = divide_up(sizes.num_tokens, warp_tokens * kPartialPolicy.warps());
  plan.shared = shared.layout;

  WorkspaceCursor workspace;
  plan.workspace.sums = workspace.take(rows * sizes.num_groups * plan.chunks, kSumBytes);
  plan.workspace.counts = workspace.take(sizes.num_groups * plan.chunks, kCountBytes);
  plan.workspace.bytes = workspace.bytes;

  if (plan.chunks) {
    plan.launches[plan.num_launches++] = {
        "reduce_partials", rows * plan.chunks, kPartialPolicy.threads, 1, static_cast<int>(shared.bytes), false};
  }
  const int threads = kCombineThreads[plan.chunks > kCombineNarrowChunks];
  plan.launches[plan.num_launches++] = {"combine_partials",
                                        rows * sizes.num_groups,
                                        threads,
                                        1,
                                        threads / kLanes * 16,
                                        policy.dependent_launch && plan.chunks};
}

void plan_documents(ReducePlan& plan, const ReduceSizes& sizes, const PathPolicy& policy) {
  const std::int64_t rows = std::max<std::int64_t>(sizes.num_rows, 1);
  const std::int64_t warp_tokens = chunked_warp_tokens(sizes.num_tokens, kDocumentPolicy);
  plan.path = ReducePath::kDocuments;
  plan.warp_tokens = static_cast<int>(warp_tokens);
  plan.chunks = divide_up(sizes.num_tokens, warp_tokens * kDocumentPolicy.warps());

  const std::int64_t warps = plan.chunks * kDocumentPolicy.warps();
  WorkspaceCursor workspace;
  plan.workspace.sums = workspace.take(rows * warps, kSumBytes);
  plan.workspace.counts = workspace.take(warps, kCountBytes);
  plan.workspace.document_sums = workspace.take(rows * sizes.num_segments, kSumBytes);
  plan.workspace.document_counts = workspace.take(sizes.num_segments, kCountBytes);
  plan.workspace.unsorted = workspace.take(plan.chunks, kCountBytes);
  plan.workspace.bytes = workspace.bytes;

  if (plan.chunks) {
    plan.launches[plan.num_launches++] = {"reduce_documents",
                                          rows * plan.chunks,
                                          kDocumentPolicy.threads,
                                          1,
                                          kPivotBytes + kDocumentPolicy.warps() * kRowTokens * 4,
                                          false};
  }
  const bool dependent = policy.dependent_launch && plan.chunks;
  if (sizes.has_group_ids) {
    plan.launches[plan.num_launches++] = {"combine_documents_by_group",
                                          rows * divide_up(sizes.num_groups, kGroupRange),
                                          kGroupRangeThreads,
                                          1,
                                          kGroupRangeThreads / kLanes * kGroupRange * 16,
                                          dependent};
  } else {
    plan.launches[plan.num_launches++] = {"combine_documents",
                                          rows * divide_up(sizes.num_groups, kDocumentOutputThreads),
                                          kDocumentOutputThreads,
                                          1,
                                          0,
                                          dependent};
  }
}

constexpr int kClusterSizes[] = {1, 2, 4, 8, 16};

/// The smallest cluster that the policy takes for so many tokens; 0 where several launches are better.
int choose_cluster(std::int64_t num_tokens, const PathPolicy& policy, const CudaDevice& device) {
  for (int i = 0; i < 5; ++i) {
    if (kClusterSizes[i] <= device.max_cluster_blocks && num_tokens <= policy.one_launch_tokens[i]) {
      return kClusterSizes[i];
    }
  }
  return 0;
}

bool is_cluster_size(int blocks) {
  return std::find(std::begin(kClusterSizes), std::end(kClusterSizes), blocks) != std::end(kClusterSizes);
}

}  // namespace

ReducePlan plan_reduce(const ReduceSizes& sizes, const CudaDevice& device, const LaunchChoice& choice) {
  ReducePlan plan;
  if (sizes.num_tokens < 0 || sizes.num_segments < 0 || sizes.num_groups < 0 || sizes.num_rows < 0) {
    plan.status = invalid("sizes must not be negative");
    return plan;
  }
  if (choice.cluster_blocks && !is_cluster_size(choice.cluster_blocks)) {
    plan.status = invalid("cluster_blocks must be 0, 1, 2, 4, 8 or 16");
    return plan;
  }
  if (choice.cluster_blocks > std::max(device.max_cluster_blocks, 1)) {
    plan.status = invalid("this device does not place clusters of so many blocks");
    return plan;
  }
  if (sizes.num_groups == 0) return plan;  // nothing to write

  const PathPolicy policy = select_path_policy(device.compute_capability);
  const auto fits = [&](const SharedMemory& shared) { return shared.bytes <= device.shared_memory_per_block; };

  // One launch.
  int cluster = choice.cluster_blocks ? choice.cluster_blocks : choose_cluster(sizes.num_tokens, policy, device);
  if (!cluster) cluster = std::clamp(device.max_cluster_blocks, 1, 16);  // if it is forced without a size
  bool one_private = sizes.num_groups <= policy.private_groups_one_launch;
  SharedMemory one_shared = shared_memory_for_groups(sizes.num_groups, one_private, kOneLaunchPolicy, cluster);
  if (one_private && !fits(one_shared)) {
    one_private = false;
    one_shared = shared_memory_for_groups(sizes.num_groups, one_private, kOneLaunchPolicy, cluster);
  }
  const bool one_possible = fits(one_shared) && sizes.num_tokens <= cluster * kMaxChunkTokens;

  // Two launches.
  const bool two_private = sizes.num_groups <= policy.private_groups_partial;
  const SharedMemory two_shared = shared_memory_for_groups(sizes.num_groups, two_private, kPartialPolicy, 0);
  const bool two_possible = fits(two_shared);

  ReducePath path = choice.path;
  if (path == ReducePath::kAutomatic) {
    const bool few_groups =
        sizes.num_groups <= (sizes.has_group_ids ? policy.entry_groups : policy.private_groups_one_launch);
    if (choice.cluster_blocks) {
      path = ReducePath::kOneLaunch;
    } else if (!few_groups || !two_possible) {
      path = ReducePath::kDocuments;
    } else if (one_possible && choose_cluster(sizes.num_tokens, policy, device)) {
      path = ReducePath::kOneLaunch;
    } else {
      path = ReducePath::kTwoLaunches;
    }
  }

  switch (path) {
    case ReducePath::kOneLaunch:
      if (!one_possible) {
        plan.status = invalid("too many groups or tokens for one launch");
        return plan;
      }
      plan.private_entries = one_private;
      plan_one_launch(plan, sizes, cluster, one_shared);
      break;
    case ReducePath::kTwoLaunches:
      if (!two_possible) {
        plan.status = invalid("too many groups for sums in shared memory");
        return plan;
      }
      plan.private_entries = two_private;
      plan_two_launches(plan, sizes, policy, two_shared);
      break;
    default:
      if (sizes.num_segments > kMaxLabels) {
        plan.status = invalid("more than 2^31 - 16 segments with so many groups");
        return plan;
      }
      plan_documents(plan, sizes, policy);
  }
  for (int i = 0; i < plan.num_launches; ++i) {
    if (plan.launches[i].grid > kMaxGrid) plan.status = invalid("sizes need a grid of more than 2^31 - 1 blocks");
  }
  return plan;
}

GatherPlan plan_gather(const GatherSizes& sizes, const CudaDevice&) {
  GatherPlan plan;
  if (sizes.num_tokens < 0 || sizes.num_segments < 0 || sizes.num_groups < 0 || sizes.num_rows < 0) {
    plan.status = invalid("sizes must not be negative");
    return plan;
  }
  if (sizes.num_groups > kMaxLabels) {
    plan.status = invalid("more than 2^31 - 16 groups");
    return plan;
  }
  if (!sizes.num_tokens || !sizes.num_rows) return plan;
  const std::int64_t warp_tokens = chunked_warp_tokens(sizes.num_tokens, kGatherPolicy);
  plan.warp_tokens = static_cast<int>(warp_tokens);
  const std::int64_t chunks = divide_up(sizes.num_tokens, warp_tokens * kGatherPolicy.warps());
  plan.num_launches = 1;
  plan.launch = {
      "gather", sizes.num_rows * chunks, kGatherPolicy.threads, 1, kPivotBytes + kGatherPolicy.warps() * kRowTokens * 4,
      false};
  if (plan.launch.grid > kMaxGrid) plan.status = invalid("sizes need a grid of more than 2^31 - 1 blocks");
  return plan;
}

}  // namespace segscatter::core
