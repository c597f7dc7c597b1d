// SPDX-License-Identifier: Apache-2.0
/// Runs a problem through the real plan and the real kernels on the SIMT shim.
#pragma once

#include <cstdint>
#include <vector>

#include "segscatter/core.h"
#include "segscatter/plan.h"
#include "shim/simt.h"
#include "support/problem.h"

namespace segscatter::testing {

/// GPUs that a plan may be made for.
core::CudaDevice turing();     ///< 7.5: small shared memory, no clusters, no dependent launch
core::CudaDevice ampere();     ///< 8.0: no clusters, no dependent launch
core::CudaDevice hopper();     ///< 9.0: clusters of 16
core::CudaDevice blackwell();  ///< 12.0: clusters of 8, less shared memory

/// How a problem is run.
struct How {
  core::CudaDevice device = hopper();
  core::LaunchChoice choice;
  std::uint64_t schedule = 0;  ///< seed of the schedule, and of what scratch memory holds at first
};

core::ReduceSizes sizes_of(const Problem& problem);

struct ReduceResult {
  std::vector<unsigned char> sum_bytes, count_bytes;  ///< as the kernels left them
  std::vector<double> sums;                           ///< [num_rows][num_groups]
  std::vector<std::int64_t> counts;                   ///< [num_groups]

  bool operator==(const ReduceResult& other) const {
    return sum_bytes == other.sum_bytes && count_bytes == other.count_bytes;
  }
};

/// What reduce_cuda() and gather_cuda() launch.
std::vector<simt::Launch> reduce_launches(const core::ReduceArgs& args, const core::ReducePlan& plan, void* workspace);
std::vector<simt::Launch> gather_launches(const core::GatherArgs& args, const core::GatherPlan& plan);

/// The plan has to be ok. Adds a GoogleTest failure if anything was written that is not a result: beside a buffer, or
/// to an input.
ReduceResult run_reduce(const Problem& problem, const How& how);

/// `old_sums` is the source ([num_rows][num_groups], of type `sum_type`), `value_type` the type of the result; `values`
/// are not used. Returns the bit patterns of [num_rows][num_tokens].
std::vector<std::uint64_t> run_gather(const Problem& problem, const How& how);

}  // namespace segscatter::testing
