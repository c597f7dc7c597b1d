// SPDX-License-Identifier: Apache-2.0
/// From the arguments of an entry point and a plan to the parameters of the kernels. Host code.
#pragma once

#include <algorithm>
#include <cstring>

#include "csrc/core/cuda/gather.cuh"
#include "csrc/core/cuda/reduce.cuh"

namespace segscatter::core::cuda {

/// Bytes of the mask's elements as the kernels see them. No mask is read as 1-byte elements that are not read at all.
inline int mask_bytes(MaskType type) {
  switch (type) {
    case MaskType::kInt32:
    case MaskType::kFloat32:
      return 4;
    case MaskType::kInt64:
      return 8;
    default:
      return 1;
  }
}

/// `mask` is one that detail::simplify() gave.
inline MaskTest make_mask_test(const Mask& mask) {
  MaskTest test;
  switch (mask.type) {
    case MaskType::kNone:
      test.ignored = 0x01010101u;  // elements that are not read are zero, and so live
      break;
    case MaskType::kUInt8:
    case MaskType::kInt8:
      test.ignored = 0x01010101u * static_cast<std::uint8_t>(mask.ignore_index);
      break;
    case MaskType::kInt32:
      test.ignored = static_cast<std::uint32_t>(mask.ignore_index);
      break;
    case MaskType::kInt64:
      test.ignored = static_cast<std::uint64_t>(mask.ignore_index);
      break;
    case MaskType::kFloat32: {
      const float ignored =
          static_cast<float>(mask.ignore_index);  // never NaN: equal bits are equal numbers, but for 0
      std::uint32_t bits;
      std::memcpy(&bits, &ignored, sizeof bits);
      test.ignored = bits;
      if (ignored == 0.f) test.compared = 0x7fffffffu;
      break;
    }
  }
  return test;
}

/// `unread` is any address on the device: it stands where there is no mask.
inline WalkParams make_walk_params(const Segments& segments, const Mask& mask, std::int64_t num_tokens, int warp_tokens,
                                   const void* unread) {
  const OffsetMap& map = segments.map;
  WalkParams p;
  p.segments = segments;
  const bool mapped =
      map.divisor != 1 || map.windows[0].begin != 0 || map.windows[0].length < num_tokens || map.windows[1].length != 0;
  p.offset_bytes = mapped ? 0 : segments.offsets.type == IndexType::kInt64 ? 8 : 4;
  p.id_bytes = !segments.group_ids.data ? 0 : segments.group_ids.type == IndexType::kInt64 ? 8 : 4;
  p.num_tokens = num_tokens;
  p.has_mask = mask.type != MaskType::kNone;
  p.mask = p.has_mask ? mask.data : unread;
  p.test = make_mask_test(mask);
  p.warp_tokens = warp_tokens;
  while (segments.num_segments >> p.pivot_shift >= kPivots) ++p.pivot_shift;
  while (segments.num_segments >> p.top_shift > 0) ++p.top_shift;
  return p;
}

inline ReduceSizes sizes_of(const ReduceArgs& args) {
  return {args.num_tokens, args.segments.num_segments, args.segments.num_groups, args.num_rows,
          args.segments.group_ids.data != nullptr};
}

inline ReduceParams make_reduce_params(const ReduceArgs& args, const Mask& mask, const ReducePlan& plan,
                                       void* workspace) {
  ReduceParams p;
  const void* unread = args.counts;
  p.walk = make_walk_params(args.segments, mask, args.num_tokens, plan.warp_tokens, unread);
  p.walk.has_values = args.num_rows > 0;
  p.walk.shared = plan.shared;
  p.values = args.num_rows ? args.values : unread;
  p.row_stride = args.row_stride;
  p.num_rows = static_cast<int>(args.num_rows);
  p.accumulate = args.accumulate;
  p.sum_type = args.sum_type;
  p.sums = args.sums;
  p.counts = args.counts;
  p.chunks = static_cast<unsigned>(plan.chunks);
  auto* base = static_cast<unsigned char*>(workspace);
  const auto counts_at = [&](std::size_t offset) { return reinterpret_cast<std::uint32_t*>(base + offset); };
  if (plan.path == ReducePath::kTwoLaunches) {
    p.partial_sums = base + plan.workspace.sums;
    p.partial_counts = counts_at(plan.workspace.counts);
  } else if (plan.path == ReducePath::kDocuments) {
    p.carry_sums = base + plan.workspace.sums;
    p.carry_counts = counts_at(plan.workspace.counts);
    p.piece_sums = base + plan.workspace.document_sums;
    p.piece_counts = counts_at(plan.workspace.document_counts);
    p.unsorted = counts_at(plan.workspace.unsorted);
  }
  return p;
}

inline GatherSizes sizes_of(const GatherArgs& args) {
  return {args.num_tokens, args.segments.num_segments, args.segments.num_groups, args.num_rows};
}

inline GatherParams make_gather_params(const GatherArgs& args, const Mask& mask, const GatherPlan& plan) {
  GatherParams p;
  p.walk = make_walk_params(args.segments, mask, args.num_tokens, plan.warp_tokens, args.out);
  p.source = args.source;
  p.source_type = args.source_type;
  p.out_type = args.out_type;
  p.out = args.out;
  p.num_rows = static_cast<int>(args.num_rows);
  return p;
}

}  // namespace segscatter::core::cuda
