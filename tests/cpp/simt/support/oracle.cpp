// SPDX-License-Identifier: Apache-2.0
#include "support/oracle.h"

#include <cmath>
#include <sstream>

namespace segscatter::testing {
namespace {

// The place in the global row of token t of this rank, for the layouts that cut the row and not its documents.
std::int64_t global_position(const Problem& problem, std::int64_t t) {
  const std::int64_t half = problem.num_tokens / 2;
  switch (problem.layout) {
    case ContextParallelLayout::kContiguous:
      return problem.rank * problem.num_tokens + t;
    case ContextParallelLayout::kPerSequence:
      return t < half ? problem.rank * half + t : (2 * problem.ranks - 1 - problem.rank) * half + (t - half);
    default:
      return t;
  }
}

}  // namespace

std::vector<std::int64_t> token_groups(const Problem& problem) {
  std::vector<std::int64_t> groups(problem.num_tokens, -1);
  const auto group_of = [&problem](std::int64_t d) {
    const std::int64_t group = problem.identity ? d : problem.ids[d];
    return group >= 0 && group < problem.num_groups ? group : -1;
  };
  if (problem.layout == ContextParallelLayout::kPerDocument) {
    // Of every document, this rank holds two pieces of 1 / (2 * ranks) each, one document after the other.
    std::int64_t t = problem.offsets[0] / problem.ranks;
    for (std::int64_t d = 0; d < problem.num_segments(); ++d) {
      const std::int64_t held = (problem.offsets[d + 1] - problem.offsets[d]) / problem.ranks;
      for (std::int64_t i = 0; i < held; ++i, ++t) {
        if (t < problem.num_tokens) groups[t] = group_of(d);
      }
    }
    return groups;
  }
  std::int64_t d = -1;
  std::int64_t before = -1;
  for (std::int64_t t = 0; t < problem.num_tokens; ++t) {
    const std::int64_t at = global_position(problem, t);
    if (at < before) d = -1;
    before = at;
    // The last document that begins at or before the token.
    while (d + 1 <= problem.num_segments() && problem.offsets[d + 1] <= at) ++d;
    if (d >= 0 && d < problem.num_segments()) groups[t] = group_of(d);
  }
  return groups;
}

std::vector<bool> token_liveness(const Problem& problem) {
  std::vector<bool> live(problem.num_tokens, true);
  if (problem.mask_type == MaskType::kNone) return live;
  const auto ignored = static_cast<long double>(problem.ignore_index);
  for (std::int64_t t = 0; t < problem.num_tokens; ++t) live[t] = decode(problem.mask_type, problem.mask[t]) != ignored;
  return live;
}

Sums expected_sums(const Problem& problem) {
  const std::int64_t rows = problem.num_rows, groups = problem.num_groups, tokens = problem.num_tokens;
  const std::vector<std::int64_t> group = token_groups(problem);
  const std::vector<bool> live = token_liveness(problem);
  Sums result;
  result.sums.assign(rows * groups, 0);
  result.magnitude.assign(rows * groups, 0);
  result.counts.assign(groups, 0);
  if (problem.accumulate) {
    for (std::int64_t i = 0; i < rows * groups; ++i) {
      result.sums[i] = problem.old_sums[i];
      result.magnitude[i] = std::fabs(problem.old_sums[i]);
    }
    result.counts = problem.old_counts;
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    if (group[t] < 0 || !live[t]) continue;
    ++result.counts[group[t]];
    for (std::int64_t k = 0; k < rows; ++k) {
      const double value = decode(problem.value_type, problem.values[k * tokens + t]);
      result.sums[k * groups + group[t]] += value;
      result.magnitude[k * groups + group[t]] += std::fabs(value);
    }
  }
  return result;
}

std::string compare_sum(FloatType type, double got, long double want, long double magnitude) {
  bool right;
  if (std::isnan(want)) {
    right = std::isnan(got);
  } else if (std::isinf(want)) {
    right = got == static_cast<double>(want);
  } else {
    long double bound = 2e-13L * magnitude;
    if (type == FloatType::kFloat32) bound += std::ldexp(std::fabs(want), -24) + std::ldexp(1.0L, -149);
    right = std::fabs(static_cast<long double>(got) - want) <= bound;
  }
  if (right) return {};
  std::ostringstream text;
  text.precision(20);
  text << "got " << got << ", want " << want << " (magnitude " << magnitude << ")";
  return text.str();
}

}  // namespace segscatter::testing
