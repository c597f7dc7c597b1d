// SPDX-License-Identifier: Apache-2.0
/// A problem with its memory, a call of the core on it, and an oracle that shares no code with the core.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "segscatter/core.h"

namespace segscatter::core::test {

struct Problem {
  std::vector<float> values;  // [rows, tokens]
  std::int64_t rows = 1;
  std::vector<std::int64_t> offsets;
  std::vector<std::int64_t> ids;  // empty: identity
  bool identity = false;
  std::int64_t groups = 0;
  std::vector<std::uint8_t> mask;  // empty: none
  std::int64_t ignore = 0;

  std::int64_t tokens() const { return rows == 0 ? 0 : static_cast<std::int64_t>(values.size()) / rows; }
  std::int64_t segments() const { return static_cast<std::int64_t>(offsets.size()) - 1; }
};

struct Result {
  std::vector<double> sums;
  std::vector<std::int64_t> counts;
  bool operator==(const Result& other) const { return sums == other.sums && counts == other.counts; }
};

inline Segments segments_of(const Problem& p, const OffsetMap& map) {
  return {{p.offsets.data(), IndexType::kInt64},
          {p.identity ? nullptr : p.ids.data(), IndexType::kInt64},
          p.segments(),
          p.groups,
          map};
}

inline OffsetMap whole_row(const Problem& p) {
  return make_offset_map(ContextParallelLayout::kNone, 1, 0, p.tokens());
}

inline Mask mask_of(const Problem& p) {
  return p.mask.empty() ? Mask{} : Mask{p.mask.data(), MaskType::kUInt8, p.ignore};
}

/// One thread per task.
inline Executor threads(int workers) {
  return {workers, [](void*, int tasks, void (*task)(void*, int), void* argument) {
            std::vector<std::thread> pool;
            for (int i = 0; i < tasks; ++i) pool.emplace_back(task, argument, i);
            for (std::thread& thread : pool) thread.join();
          }};
}

inline Result reduce(const Problem& p, CpuCapability capability = cpu_capability(), const Executor& executor = {}) {
  Result result{std::vector<double>(static_cast<std::size_t>(p.rows * p.groups), -1.0),
                std::vector<std::int64_t>(static_cast<std::size_t>(p.groups), -1)};
  ReduceArgs args;
  args.values = p.values.data();
  args.num_rows = p.rows;
  args.num_tokens = p.tokens();
  args.row_stride = p.tokens();
  args.segments = segments_of(p, whole_row(p));
  args.mask = mask_of(p);
  args.sums = result.sums.data();
  args.sum_type = FloatType::kFloat64;
  args.counts = result.counts.data();
  const std::size_t bytes = reduce_cpu_workspace(args, executor);
  std::vector<unsigned char> memory(bytes + 64, 0xa5);
  void* workspace = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  const Status status = reduce_cpu(args, workspace, bytes, executor, capability);
  EXPECT_TRUE(status.ok()) << status.message;
  return result;
}

/// Token by token. With small integers as values, sums are exact in any order.
inline Result oracle(const Problem& p) {
  Result result{std::vector<double>(static_cast<std::size_t>(p.rows * p.groups), 0.0),
                std::vector<std::int64_t>(static_cast<std::size_t>(p.groups), 0)};
  for (std::int64_t t = 0; t < p.tokens(); ++t) {
    if (!p.mask.empty() && p.mask[static_cast<std::size_t>(t)] == p.ignore) continue;
    for (std::int64_t d = 0; d < p.segments(); ++d) {
      const std::size_t at = static_cast<std::size_t>(d);
      if (t < p.offsets[at] || t >= p.offsets[at + 1]) continue;
      const std::int64_t group = p.identity ? d : p.ids[at];
      if (group < 0 || group >= p.groups) continue;
      ++result.counts[static_cast<std::size_t>(group)];
      for (std::int64_t row = 0; row < p.rows; ++row) {
        result.sums[static_cast<std::size_t>(row * p.groups + group)] +=
            p.values[static_cast<std::size_t>(row * p.tokens() + t)];
      }
    }
  }
  return result;
}

}  // namespace segscatter::core::test
