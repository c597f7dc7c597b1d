// SPDX-License-Identifier: Apache-2.0
/// Writing or adding to results.
#pragma once

#include "kernels.h"

namespace segscatter::core::detail {
namespace {  // included by files compiled for different instruction sets, which must not share functions

inline void add_sum(const SegmentSums& to, std::int64_t index, double sum) {
  if (to.sum_type == FloatType::kFloat64) {
    double& out = static_cast<double*>(to.sums)[index];
    out = to.accumulate ? out + sum : sum;
  } else {
    float& out = static_cast<float*>(to.sums)[index];
    out = static_cast<float>(to.accumulate ? static_cast<double>(out) + sum : sum);
  }
}

inline void add_count(const SegmentSums& to, std::int64_t index, std::int64_t count) {
  to.counts[index] = to.accumulate ? to.counts[index] + count : count;
}

}  // namespace
}  // namespace segscatter::core::detail
