// SPDX-License-Identifier: Apache-2.0
/// Second of two launches: adds up the chunks' sums of every group, in a fixed order.
#pragma once

#include "csrc/core/cuda/reduce.cuh"

namespace segscatter::core::cuda {

/// One block per row and group. Grid: max(K, 1) * G.
template <int kThreads, class Sum>
SEGSCATTER_KERNEL(kThreads, 1)
combine_partials(const SEGSCATTER_GRID_CONSTANT ReduceParams p) {
  constexpr int kWarps = kThreads / kLanes;
  const RowAndChunk at = split_index(block_index(), p.num_rows);
  const std::int64_t group = at.chunk;
  const Sum* sums = static_cast<const Sum*>(p.partial_sums) + (at.row * p.walk.segments.num_groups + group) * p.chunks;
  const std::uint32_t* counts = p.partial_counts + group * p.chunks;
  wait_for_previous_kernel();

  Sum sum{};
  std::int64_t count = 0;
  for (unsigned c = thread_index(); c < p.chunks; c += kThreads) {
    sum.add(sums[c]);
    count += counts[c];
  }
  add_over_warp(sum, count);
  if constexpr (kWarps > 1) {
    auto* warp_sums = reinterpret_cast<Sum*>(shared_memory());
    auto* warp_counts = reinterpret_cast<std::int64_t*>(warp_sums + kWarps);
    if (lane_index() == 0) {
      warp_sums[warp_index()] = sum;
      warp_counts[warp_index()] = count;
    }
    block_barrier();
    if (thread_index() == 0) {
      for (int w = 1; w < kWarps; ++w) {
        sum.add(warp_sums[w]);
        count += warp_counts[w];
      }
    }
  }
  if (thread_index() == 0) write_result(p, at.row, group, sum.value(), count);
}

}  // namespace segscatter::core::cuda
