// SPDX-License-Identifier: Apache-2.0
/// From checked tensors to the core's arguments. The structs own what had to be made contiguous or converted, so they
/// must outlive the call (on a stream: the enqueueing, since the caching allocator orders reuse).
#pragma once

#include "checks.h"
#include "segscatter/core.h"

namespace segscatter {

core::FloatType float_type(at::ScalarType type);

/// `mask` in a type whose elements compare with ignore_index as numbers do, and exactly: bool, uint8, int8, int32,
/// int64 or float32. Changes both arguments where the type has to change.
void widen_mask(at::Tensor& mask, int64_t& ignore_index);

struct CoreGrouping {
  CoreGrouping(const Grouping& grouping, int64_t num_groups, int64_t num_tokens);
  at::Tensor cu_seqlens, group_ids, mask;
  core::Segments segments;
  core::Mask core_mask;
};

struct CoreReduce {
  CoreReduce(const at::Tensor& values, const Grouping& grouping, const at::Tensor& sums, const at::Tensor& counts,
             bool accumulate);
  at::Tensor values;
  CoreGrouping grouping;
  core::ReduceArgs args;
};

struct CoreGather {
  CoreGather(const at::Tensor& source, const Grouping& grouping, const at::Tensor& out);
  at::Tensor source;
  CoreGrouping grouping;
  core::GatherArgs args;
};

/// The sizes of `tensor` with another last one.
at::DimVector with_last(const at::Tensor& tensor, int64_t last);

/// Throws what a core function reports.
void check_status(const core::Status& status);

}  // namespace segscatter
