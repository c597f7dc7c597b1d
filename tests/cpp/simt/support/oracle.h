// SPDX-License-Identifier: Apache-2.0
/// The right answers, by plain loops over what the words of the contract say. Shares no code with what is tested.
#pragma once

#include <string>
#include <vector>

#include "support/problem.h"

namespace segscatter::testing {

/// The group of every token held here, or -1. Offsets must be sorted.
std::vector<std::int64_t> token_groups(const Problem& problem);

/// Whether every token is live.
std::vector<bool> token_liveness(const Problem& problem);

struct Sums {
  std::vector<long double> sums;       ///< [num_rows][num_groups]
  std::vector<long double> magnitude;  ///< the same of absolute values, a yardstick for errors
  std::vector<std::int64_t> counts;    ///< [num_groups]
};
Sums expected_sums(const Problem& problem);

/// Empty if `got` is `want` to rounding, else what is wrong. An accumulation in float64 or better, rounded once to
/// `type`.
std::string compare_sum(FloatType type, double got, long double want, long double magnitude);

}  // namespace segscatter::testing
