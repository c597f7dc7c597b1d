// SPDX-License-Identifier: Apache-2.0
/// How a row of tokens is cut into chunks, and how workers share them.
#pragma once

#include <algorithm>

#include "kernels.h"

namespace segscatter::core::detail {

/// Chunks depend on the number of tokens only, so the bits of a result do not depend on the number of threads.
struct Chunks {
  static constexpr std::int64_t kMinSize = 16384;  ///< tokens: a few microseconds, and the data stays in the L2 cache
  static constexpr std::int64_t kMaxCount = 512;   ///< bounds the memory of partial sums

  explicit Chunks(std::int64_t num_tokens) : num_tokens(num_tokens) {
    const std::int64_t wanted = (num_tokens + kMaxCount - 1) / kMaxCount;
    size = std::max(kMinSize, (wanted + kMinSize - 1) / kMinSize * kMinSize);
    count = (num_tokens + size - 1) / size;
  }
  Chunk operator[](std::int64_t i) const {
    return {i * size, static_cast<std::int32_t>(std::min(size, num_tokens - i * size))};
  }

  std::int64_t num_tokens, size, count;
};

/// Calls body(worker, i) for i in [0, count), every worker a run of successive numbers.
template <class Body>
void for_each_chunk(const Executor& executor, int workers, std::int64_t count, const Body& body) {
  if (workers <= 1) {
    for (std::int64_t i = 0; i < count; ++i) body(0, i);
    return;
  }
  struct Share {
    const Body& body;
    std::int64_t count;
    int workers;
  } share{body, count, workers};
  executor.run(
      executor.context, workers,
      [](void* argument, int worker) {
        const Share& share = *static_cast<const Share*>(argument);
        const std::int64_t begin = share.count * worker / share.workers;
        const std::int64_t end = share.count * (worker + 1) / share.workers;
        for (std::int64_t i = begin; i < end; ++i) share.body(worker, i);
      },
      &share);
}

/// How many of the executor's workers `count` chunks can use.
inline int workers_for(const Executor& executor, std::int64_t count) {
  if (executor.run == nullptr) return 1;
  return static_cast<int>(std::clamp<std::int64_t>(count, 1, std::max(executor.workers, 1)));
}

}  // namespace segscatter::core::detail
