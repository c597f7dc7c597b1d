// SPDX-License-Identifier: Apache-2.0
// The floor of any reduction on the CPU: reads bytes with torch's threads and does as little as possible with them.
#include <cstddef>
#include <cstdint>

extern "C" std::uint64_t read_bytes(const void* data, std::size_t bytes) {
  const std::uint64_t* words = static_cast<const std::uint64_t*>(data);
  const std::int64_t count = static_cast<std::int64_t>(bytes / sizeof(std::uint64_t));
  constexpr std::int64_t kChunk = 8192, kStreams = 8;
  std::uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(^ : total)
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t end = begin + kChunk < count ? begin + kChunk : count;
    std::uint64_t streams[kStreams] = {};
    std::int64_t i = begin;
    for (; i + kStreams <= end; i += kStreams) {
      for (std::int64_t j = 0; j < kStreams; ++j) streams[j] ^= words[i + j];
    }
    for (; i < end; ++i) total ^= words[i];
    for (std::int64_t j = 0; j < kStreams; ++j) total ^= streams[j];
  }
  return total;
}
