// SPDX-License-Identifier: Apache-2.0
/// Walking the documents of a chunk: offsets come in blocks, already mapped, clamped to the chunk and 32 bits wide, so
/// that the loops over tokens know nothing of index types and context parallelism.
#pragma once

#include <cstdint>

#include "../segments.h"
#include "kernels.h"

namespace segscatter::core::detail {

namespace {  // included by files compiled for different instruction sets, which must not share functions

/// The last segment that starts at or before local token x; 0 where none does. In bounds for every content.
inline std::int64_t find_segment(const Segments& segments, std::int64_t x) {
  std::int64_t low = 0, high = segments.num_segments + 1;  // invariant of sorted offsets: low is behind, high is not
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (local_offset(segments.map, load_index(segments.offsets, middle)) <= x) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low > 0 ? low - 1 : 0;
}

/// Up to kCapacity successive segments, seen from a chunk.
class DocumentBlock {
 public:
  static constexpr int kCapacity = 128;

  DocumentBlock(const Segments& segments, const Chunk& chunk) : segments_(segments), chunk_(chunk) {
    next_ = find_segment(segments, chunk.begin);
  }

  /// Moves to the next segments. False when there is none left that could start inside the chunk.
  bool advance() {
    if (next_ >= segments_.num_segments || done_) return false;
    first_ = next_;
    count_ = static_cast<int>(clamp(segments_.num_segments - first_, 0, kCapacity));
    next_ = first_ + count_;
    if (segments_.offsets.type == IndexType::kInt64) {
      place(static_cast<const std::int64_t*>(segments_.offsets.data) + first_);
    } else {
      place(static_cast<const std::int32_t*>(segments_.offsets.data) + first_);
    }
    done_ = position_[count_] >= chunk_.size;
    if (done_) {  // segments that start behind the chunk are not its business
      while (count_ > 1 && position_[count_ - 1] >= chunk_.size) --count_;
    }
    return true;
  }

  int count() const { return count_; }
  std::int64_t segment(int i) const { return first_ + i; }
  std::int64_t group(int i) const { return group_of(segments_, first_ + i); }

  /// Tokens [begin, end) of the i-th segment, relative to the chunk's first; never decreasing, whatever the offsets.
  std::int32_t begin(int i) const { return position_[i]; }
  std::int32_t end(int i) const { return position_[i + 1]; }

  /// Tokens of a segment, on average, rounded down.
  std::int32_t mean_size() const { return (end(count_ - 1) - begin(0)) / count_; }

 private:
  template <class Index>
  void place(const Index* offsets) {
    const OffsetMap& map = segments_.map;
    const std::int64_t size = chunk_.size;
    if (map.divisor == 1 && map.windows[1].length == 0) {  // the usual case, in one clamp that vectorises
      const std::int64_t low = map.windows[0].begin + clamp(chunk_.begin, 0, map.windows[0].length);
      const std::int64_t high = map.windows[0].begin + clamp(chunk_.begin + size, 0, map.windows[0].length);
      for (int i = 0; i <= count_; ++i) {
        position_[i] = static_cast<std::int32_t>(clamp(static_cast<std::int64_t>(offsets[i]), low, high) - low);
      }
    } else {
      for (int i = 0; i <= count_; ++i) {
        const std::int64_t local = local_offset(map, static_cast<std::int64_t>(offsets[i]));
        position_[i] = static_cast<std::int32_t>(clamp(local - chunk_.begin, 0, size));
      }
    }
    bool sorted = true;
    for (int i = 0; i < count_; ++i) sorted &= position_[i] <= position_[i + 1];
    if (sorted) return;
    for (int i = 0; i < count_; ++i)
      position_[i + 1] = position_[i] < position_[i + 1] ? position_[i + 1] : position_[i];
  }

  const Segments& segments_;
  const Chunk chunk_;
  std::int64_t first_ = 0, next_ = 0;
  int count_ = 0;
  bool done_ = false;
  std::int32_t position_[kCapacity + 1];
};

}  // namespace
}  // namespace segscatter::core::detail
