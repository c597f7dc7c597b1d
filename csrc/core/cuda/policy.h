// SPDX-License-Identifier: Apache-2.0
/// The numbers that decide speed: block sizes, rows in flight, crossovers between the paths. Nothing else depends on
/// them, except the last bits of the sums.
#pragma once

#include <cstdint>

namespace segscatter::core::cuda {

constexpr int kLanes = 32;
constexpr int kLaneTokens = 8;                    ///< consecutive tokens of a lane: 32 bytes of fp32, a whole sector
constexpr int kRowTokens = kLanes * kLaneTokens;  ///< what a warp takes in one go

/// Document boundaries that a block samples before its warps search on; with fewer, each warp searches alone.
constexpr int kPivots = 1024;
constexpr int kPivotBytes = (kPivots + kPivots / kLanes) * 4;  ///< in shared memory, pivot k at k + k / 32

/// How a kernel walks over its tokens.
struct KernelPolicy {
  int threads;     ///< of a block
  int rows_ahead;  ///< rows that a warp asks for ahead of use
  int min_blocks;  ///< per multiprocessor, what the compiler must leave registers for
  constexpr int warps() const { return threads / kLanes; }
};

/// One launch: few blocks, so each has many warps and asks for much at once.
constexpr KernelPolicy kOneLaunchPolicy{256, 4, 1};
/// Two launches (partial sums, then a combination): small chunks, so that many multiprocessors work.
constexpr KernelPolicy kPartialPolicy{128, 2, 2};
/// Sums of documents: as kPartialPolicy.
constexpr KernelPolicy kDocumentPolicy{128, 2, 2};
constexpr KernelPolicy kGatherPolicy{128, 2, 4};

/// The combination of partial sums takes a warp per group where chunks are few, a wider block where they are many.
constexpr int kCombineThreads[] = {32, 256};
constexpr int kCombineNarrowChunks = 128;

/// Documents to outputs: threads of a block, and how many groups one block keeps in shared memory.
constexpr int kDocumentOutputThreads = 128;
constexpr int kGroupRangeThreads = 256;
constexpr int kGroupRange = 384;  ///< 48 KB of sums and counts

/// Crossovers that depend on the device. By the model in docs/kernels.md, not yet by measurement on a GPU.
struct PathPolicy {
  std::int64_t one_launch_tokens[5];  ///< most tokens for which a cluster of 1, 2, 4, 8, 16 blocks is taken
  int private_groups_one_launch;      ///< most groups for which every lane has an entry of its own
  int private_groups_partial;
  int entry_groups;       ///< most groups with entries in shared memory; beyond, sums go by document
  bool dependent_launch;  ///< the second kernel may be launched while the first one runs
};

constexpr PathPolicy select_path_policy(int compute_capability) {
  if (compute_capability >= 90) return {{2048, 4096, 8192, 32768, 65536}, 28, 16, 768, true};
  return {{16384, 0, 0, 0, 0}, 28, 16, 768, false};
}

/// Chunks of the paths with several launches: a function of the number of tokens only, so that the bits of the sums do
/// not depend on the size of the GPU.
struct ChunkPolicy {
  std::int64_t tokens_per_step = std::int64_t{1} << 19;  ///< every so many tokens, a warp's run grows by min_rows
  int min_rows = 2;
  int max_rows = 32;  ///< until there are max_chunks chunks
  std::int64_t max_chunks = 2048;
};

}  // namespace segscatter::core::cuda
