// SPDX-License-Identifier: Apache-2.0
/// From sizes and a device to kernel launches: pure functions of numbers, which need no GPU.
///
///   kOneLaunch    one kernel: one cluster of blocks per value row, combined through its shared memory. For few tokens,
///                 where a launch costs more than idle multiprocessors. A cluster of 1 works on every GPU.
///   kTwoLaunches  one sum per chunk and group, then the sum over chunks.
///   kDocuments    one sum per document, then the sum over documents: for more groups than shared memory holds, and for
///                 group_ids = null with many documents. Also two kernels.
///
/// Chunks of the last two depend on the number of tokens only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "segscatter/core.h"

namespace segscatter::core {

/// One kernel launch. Grids and blocks are one-dimensional.
struct KernelLaunch {
  const char* kernel = "";
  std::int64_t grid = 0;   ///< in blocks
  int block = 0;           ///< in threads
  int cluster = 1;         ///< in blocks
  int shared_bytes = 0;    ///< dynamic shared memory of a block
  bool dependent = false;  ///< programmatic dependent launch: may be brought up while the launch before it runs
};

struct ReduceSizes {
  std::int64_t num_tokens = 0;
  std::int64_t num_segments = 0;
  std::int64_t num_groups = 0;
  std::int64_t num_rows = 1;
  bool has_group_ids = true;
};

/// Dynamic shared memory of a block that keeps sums by group, as offsets in bytes.
struct SharedLayout {
  int inbox = 0;         ///< sums that come from other blocks of the cluster
  int entries = 0;       ///< sums of this block's warps
  int warp_entries = 0;  ///< bytes of one warp's
};

/// Scratch memory on the device, as offsets in bytes. kTwoLaunches: sums and counts by group and chunk. kDocuments: by
/// warp (what continues a document from before) and by document (what starts one), and a flag per chunk.
struct WorkspaceLayout {
  std::size_t sums = 0;
  std::size_t counts = 0;
  std::size_t document_sums = 0;
  std::size_t document_counts = 0;
  std::size_t unsorted = 0;
  std::size_t bytes = 0;
};

struct ReducePlan {
  Status status;  ///< not ok: sizes that no path serves, or a choice that this device or size does not allow
  ReducePath path = ReducePath::kAutomatic;
  bool private_entries = false;  ///< every lane, not only every warp, keeps a sum per group
  std::int64_t chunks = 0;       ///< runs of tokens that one block takes
  int warp_tokens = 0;           ///< tokens of a warp in it
  SharedLayout shared;
  WorkspaceLayout workspace;
  int num_launches = 0;
  KernelLaunch launches[2];
};

ReducePlan plan_reduce(const ReduceSizes& sizes, const CudaDevice& device, const LaunchChoice& choice = {});

struct GatherSizes {
  std::int64_t num_tokens = 0;
  std::int64_t num_segments = 0;
  std::int64_t num_groups = 0;
  std::int64_t num_rows = 1;
};

struct GatherPlan {
  Status status;
  int warp_tokens = 0;
  int num_launches = 0;  ///< 0 where there is nothing to write
  KernelLaunch launch;
};

GatherPlan plan_gather(const GatherSizes& sizes, const CudaDevice& device);

}  // namespace segscatter::core
