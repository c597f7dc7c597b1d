// SPDX-License-Identifier: Apache-2.0
/// What the instruction-set specific files offer to reduce.cpp and gather.cpp: functions that work on one chunk. Each
/// set of them is the same source (chunk_kernels.h) over another definition of `Lanes`.
#pragma once

#include <cstdint>

#include "../segments.h"

namespace segscatter::core::detail {

/// A run of tokens that one task works on; chunks are a function of the number of tokens only.
struct Chunk {
  std::int64_t begin;
  std::int32_t size;
};

constexpr int kLanes = 16;  ///< float64 accumulators of a sum

/// Which tokens of a chunk are live: bit t % 8 of bytes[t / 8]; bits behind the last token are 0. Masks are read once,
/// whatever the number of rows, and the loops over values know nothing of mask types.
struct LiveTokens {
  static constexpr std::uint32_t kBlock = 64;  ///< tokens, whose bits are written at once
  static constexpr std::int64_t size(std::int64_t tokens) { return (tokens / kBlock + 2) * 8; }
  std::uint8_t* bytes;  ///< [size(tokens)]: eight bytes can be read from every token's on
};

/// The groups that occur in one chunk, in order of first appearance; where there are few, all of them.
struct ChunkGroups {
  std::int64_t* groups;   ///< [capacity]
  std::int64_t* counts;   ///< [capacity]
  double* sums;           ///< [num_rows, capacity]
  std::int64_t capacity;  ///< at least min(num_groups, num_segments)
  std::int32_t size = 0;
};

/// One worker's memory. Entry `capacity` takes the tokens of dropped segments, so that no loop over tokens asks.
struct GroupScratch {
  double* lanes;          ///< [capacity + 1, kLanes], in any state
  std::int64_t* counts;   ///< [capacity + 1], in any state
  std::int32_t* entries;  ///< [num_groups], the group's place in ChunkGroups; -1 before and after each chunk
};

/// Sums of whole documents, for identity groups and for more groups than a table holds. A document that lies in one
/// chunk is final there and goes to `sums` and `counts`; the pieces of one that does not go to `pieces`.
struct SegmentSums {
  void* sums;  ///< [num_rows, num_segments]
  FloatType sum_type;
  std::int64_t* counts;  ///< [num_segments]
  bool accumulate;
};

/// At most one document of sorted offsets enters a chunk from before, and one leaves it.
struct ChunkPieces {
  static constexpr int kCapacity = 2;
  std::int64_t segments[kCapacity];
  std::int64_t counts[kCapacity];
  double* sums;  ///< [num_rows, kCapacity]
  std::int32_t size = 0;
};

using FindLive = void (*)(const Mask&, const Chunk&, const LiveTokens&);
using ReduceGroups = void (*)(const ReduceArgs&, const Chunk&, const LiveTokens&, const GroupScratch&, ChunkGroups&);
using ReduceSegments = void (*)(const ReduceArgs&, const Chunk&, const LiveTokens&, const SegmentSums&, ChunkPieces&);
using GatherChunk = void (*)(const GatherArgs&, const Chunk&);

struct Kernels {
  FindLive find_live;
  ReduceGroups reduce_groups;
  ReduceSegments reduce_segments;
  GatherChunk gather;
};

/// Kernels for values (or, of `gather`, results) of a type and a simplified mask (segments.h). All null where the build
/// has none for the instruction set.
Kernels find_kernels(FloatType type, MaskType mask, CpuCapability capability);

// What find_kernels() chooses from.
Kernels kernels_default(FloatType type, MaskType mask);
Kernels kernels_avx2(FloatType type, MaskType mask);
Kernels kernels_avx512(FloatType type, MaskType mask);

}  // namespace segscatter::core::detail
