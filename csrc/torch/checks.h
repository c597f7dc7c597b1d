// SPDX-License-Identifier: Apache-2.0
/// What can be known about arguments without reading device data, checked in one place for all backends (sizes may be
/// symbolic). Messages name the operator, the argument, what was given and what is wanted.
#pragma once

#include "ops.h"
#include "segscatter/core.h"

namespace segscatter {

/// The arguments that say how tokens belong to groups; references, so made and used within one call.
struct Grouping {
  const at::Tensor& cu_seqlens;
  const OptionalTensor& group_ids;
  const OptionalTensor& mask;
  int64_t ignore_index;
  std::string_view cp_layout;
  int64_t cp_size;
  int64_t cp_rank;
};

core::ContextParallelLayout parse_layout(const char* op, std::string_view layout);

/// Throws c10::ValueError or c10::TypeError. Returns the dtype of the sums.
at::ScalarType check_reduce(const at::Tensor& values, const Grouping& grouping, const c10::SymInt& num_groups,
                            OptionalDtype dtype);
void check_accumulate(const at::Tensor& sums, const at::Tensor& counts, const at::Tensor& values,
                      const Grouping& grouping);
/// Throws RuntimeError where `sums` or `counts` share memory with another argument. Not for tensors without data.
void check_no_overlap(const at::Tensor& sums, const at::Tensor& counts, const at::Tensor& values,
                      const Grouping& grouping);
/// Returns the dtype of the result.
at::ScalarType check_gather(const at::Tensor& source, const Grouping& grouping, const c10::SymInt& num_tokens,
                            OptionalDtype dtype);
/// Checks of cu_seqlens, group_ids and the context-parallel arguments alone.
void check_segments(const char* op, const Grouping& grouping, const c10::SymInt& num_groups,
                    const c10::SymInt& num_tokens, at::Device device, const char* device_of);

/// Reads the contents of cu_seqlens and group_ids (synchronises); throws c10::ValueError at the first bad position.
void validate_contents(const Grouping& grouping, int64_t num_groups, int64_t num_tokens);

/// validate_contents() if the environment variable SEGSCATTER_VALIDATE was 1 when the library was first used.
void validate_if_asked(const Grouping& grouping, int64_t num_groups, int64_t num_tokens);

}  // namespace segscatter
