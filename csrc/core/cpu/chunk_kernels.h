// SPDX-License-Identifier: Apache-2.0
/// The work on one chunk, written once over `Isa`, which supplies:
///
///     struct Isa {
///       template <class M> static uint32_t live(const M* mask, M ignore);      // bit j: mask[j] != ignore, j < 16
///       template <class M> static uint32_t live(const M* mask, M ignore, uint32_t range);  // reads only j in range
///       template <class V> struct Lanes {                                      // 16 float64 sums in registers
///         explicit Lanes(const double*);
///         void add(const V* values, uint32_t live);                            // reads all 16 values
///         void store(double*) const;
///       };
///       template <class V> static void add(double* lanes, const V* values, uint32_t live);  // reads only live ones
///     };
///
/// Every definition adds the same numbers to the same lanes in the same order, so all give the same bits. (A dead
/// token's +0.0 changes nothing: a lane starts at +0.0 and a sum is -0.0 only if both operands are.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "documents.h"
#include "half.h"
#include "kernels.h"

namespace segscatter::core::detail {
namespace {  // included by files compiled for different instruction sets, which must not share functions

struct NoMask {};

template <class Isa, class M>
std::uint32_t live_bits(const M* mask, std::int64_t at, M ignore) {
  if constexpr (std::is_same_v<M, NoMask>) {
    return 0xffff;
  } else {
    return Isa::live(mask + at, ignore);
  }
}
template <class Isa, class M>
std::uint32_t live_bits(const M* mask, std::int64_t at, M ignore, std::uint32_t range) {
  if constexpr (std::is_same_v<M, NoMask>) {
    return range;
  } else {
    return Isa::live(mask + at, ignore, range);
  }
}

template <class M>
M ignored_value(const Mask& mask) {
  if constexpr (std::is_same_v<M, NoMask>) {
    return {};
  } else {
    return static_cast<M>(mask.ignore_index);
  }
}

/// Adds tokens [begin, end) to 16 lanes; returns how many are live. `values` and `mask` start on a lane-0 token.
template <class Isa, class V, class M>
std::int64_t add_piece(double* lanes, const V* values, const M* mask, M ignore, std::int32_t begin, std::int32_t end) {
  std::int32_t at = begin & ~(kLanes - 1);
  std::int64_t count = 0;
  const auto partial = [&](std::uint32_t range) {
    const std::uint32_t live = live_bits<Isa>(mask, at, ignore, range);
    Isa::template add<V>(lanes, values + at, live);
    count += __builtin_popcount(live);
    at += kLanes;
  };
  const std::uint32_t first = 0xffffu << (begin - at) & 0xffffu;
  if (end - at < kLanes) {
    partial(first & 0xffffu >> (kLanes - (end - at)));
    return count;
  }
  if (at != begin) partial(first);
  if (end - at >= kLanes) {
    typename Isa::template Lanes<V> sums(lanes);
    for (; end - at >= kLanes; at += kLanes) {
      const std::uint32_t live = live_bits<Isa>(mask, at, ignore);
      sums.add(values + at, live);
      count += __builtin_popcount(live);
    }
    sums.store(lanes);
  }
  if (at < end) partial(0xffffu >> (kLanes - (end - at)));
  return count;
}

inline void clear_lanes(double* lanes) {
  for (int j = 0; j < kLanes; ++j) lanes[j] = 0.0;
}

/// The one reduction tree: lane j takes lane j + 8, then + 4, + 2, + 1.
inline double sum_lanes(const double* lanes) {
  double s[8];
  for (int j = 0; j < 8; ++j) s[j] = lanes[j] + lanes[j + 8];
  for (int j = 0; j < 4; ++j) s[j] += s[j + 4];
  for (int j = 0; j < 2; ++j) s[j] += s[j + 2];
  return s[0] + s[1];
}

/// Groups by table: every group that occurs has 16 lanes, so a document costs no horizontal sum.
template <class Isa, class V, class M>
void reduce_groups(const ReduceArgs& args, const Chunk& chunk, const GroupScratch& scratch, ChunkGroups& out) {
  const M ignore = ignored_value<M>(args.mask);
  const M* mask = static_cast<const M*>(args.mask.data);
  if constexpr (!std::is_same_v<M, NoMask>) mask += chunk.begin;
  out.size = 0;
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const V* values = static_cast<const V*>(args.values) + row * args.row_stride + chunk.begin;
    DocumentBlock documents(args.segments, chunk);
    while (documents.advance()) {
      for (int i = 0; i < documents.count(); ++i) {
        const std::int32_t begin = documents.begin(i), end = documents.end(i);
        if (begin >= end) continue;
        const std::int64_t group = documents.group(i);
        if (group < 0) continue;
        std::int32_t entry = scratch.entries[group];
        if (entry < 0) {
          entry = scratch.entries[group] = out.size++;
          out.groups[entry] = group;
          out.counts[entry] = 0;
          clear_lanes(scratch.lanes + static_cast<std::int64_t>(entry) * kLanes);
        }
        const std::int64_t count =
            add_piece<Isa>(scratch.lanes + static_cast<std::int64_t>(entry) * kLanes, values, mask, ignore, begin, end);
        if (row == 0) out.counts[entry] += count;
      }
    }
    for (std::int32_t entry = 0; entry < out.size; ++entry) {
      double* lanes = scratch.lanes + static_cast<std::int64_t>(entry) * kLanes;
      out.sums[row * out.capacity + entry] = sum_lanes(lanes);
      if (row + 1 < args.num_rows) clear_lanes(lanes);
    }
  }
  for (std::int32_t entry = 0; entry < out.size; ++entry) scratch.entries[out.groups[entry]] = -1;
}

/// Fewer tokens than this are added one after the other: cheaper than 16 lanes and their tree.
constexpr std::int32_t kShortPiece = 8;

struct PieceSum {
  double sum;
  std::int64_t count;
};

template <class Isa, class V, class M>
PieceSum sum_piece(const V* values, const M* mask, M ignore, std::int32_t begin, std::int32_t end) {
  if (end - begin < kShortPiece) {
    PieceSum piece{0.0, 0};
    for (std::int32_t t = begin; t < end; ++t) {
      bool live = true;
      if constexpr (!std::is_same_v<M, NoMask>) live = mask[t] != ignore;
      piece.sum += live ? to_double(values[t]) : 0.0;
      piece.count += live;
    }
    return piece;
  }
  alignas(64) double lanes[kLanes] = {};
  const std::int64_t count = add_piece<Isa>(lanes, values, mask, ignore, begin, end);
  return {sum_lanes(lanes), count};
}

/// Documents one by one: no table, so the number of groups does not matter.
template <class Isa, class V, class M>
void reduce_segments(const ReduceArgs& args, const Chunk& chunk, const SegmentSums& out, ChunkPieces& pieces) {
  const M ignore = ignored_value<M>(args.mask);
  const M* mask = static_cast<const M*>(args.mask.data);
  if constexpr (!std::is_same_v<M, NoMask>) mask += chunk.begin;
  const std::int64_t chunk_end = chunk.begin + chunk.size;
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const V* values = static_cast<const V*>(args.values) + row * args.row_stride + chunk.begin;
    DocumentBlock documents(args.segments, chunk);
    pieces.size = 0;
    while (documents.advance()) {
      for (int i = 0; i < documents.count(); ++i) {
        const std::int32_t begin = documents.begin(i), end = documents.end(i);
        if (begin >= end) continue;
        const std::int64_t segment = documents.segment(i);
        const PieceSum piece = sum_piece<Isa>(values, mask, ignore, begin, end);
        const auto bound = [&](std::int64_t d) {
          return local_offset(args.segments.map, load_index(args.segments.offsets, d));
        };
        const bool whole = (begin > 0 || bound(segment) >= chunk.begin) &&
                           (end < chunk.size || bound(segment + 1) <= chunk_end);
        if (whole) {
          out.add(row * args.segments.num_segments + segment, piece.sum);
          if (row == 0) out.add_count(segment, piece.count);
        } else if (pieces.size < ChunkPieces::kCapacity) {  // more only where offsets are not sorted
          pieces.segments[pieces.size] = segment;
          pieces.counts[pieces.size] = piece.count;
          pieces.sums[row * ChunkPieces::kCapacity + pieces.size] = piece.sum;
          ++pieces.size;
        }
      }
    }
  }
}

/// Bits of `value` in the output type.
inline std::uint64_t encode(FloatType type, double value) {
  switch (type) {
    case FloatType::kFloat64:
      return bit_cast<std::uint64_t>(value);
    case FloatType::kFloat32:
      return bit_cast<std::uint32_t>(static_cast<float>(value));
    case FloatType::kBFloat16:
      return to_bfloat16(static_cast<float>(value)).bits;
    case FloatType::kFloat16:
      return to_float16(static_cast<float>(value)).bits;
  }
  return 0;
}

inline double decode(FloatType type, const void* data, std::int64_t i) {
  switch (type) {
    case FloatType::kFloat64:
      return static_cast<const double*>(data)[i];
    case FloatType::kFloat32:
      return static_cast<const float*>(data)[i];
    case FloatType::kBFloat16:
      return to_double(static_cast<const BFloat16*>(data)[i]);
    case FloatType::kFloat16:
      return to_double(static_cast<const Float16*>(data)[i]);
  }
  return 0;
}

/// `Bits` is an unsigned integer of the output type's size. Every token is written once, whatever the offsets say.
template <class Bits, class M>
void gather_chunk(const GatherArgs& args, const Chunk& chunk) {
  const M ignore = ignored_value<M>(args.mask);
  const M* mask = static_cast<const M*>(args.mask.data);
  if constexpr (!std::is_same_v<M, NoMask>) mask += chunk.begin;
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    Bits* out = static_cast<Bits*>(args.out) + row * args.num_tokens + chunk.begin;
    std::int32_t written = 0;
    const auto fill_zero = [&](std::int32_t end) {
      for (; written < end; ++written) out[written] = 0;
    };
    DocumentBlock documents(args.segments, chunk);
    while (documents.advance()) {
      for (int i = 0; i < documents.count(); ++i) {
        const std::int32_t end = documents.end(i);
        fill_zero(documents.begin(i));
        if (written >= end) continue;
        const std::int64_t group = documents.group(i);
        if (group < 0) {
          fill_zero(end);
          continue;
        }
        const double value = decode(args.source_type, args.source, row * args.segments.num_groups + group);
        const Bits bits = static_cast<Bits>(encode(args.out_type, value));
        for (std::int32_t t = written; t < end; ++t) {
          if constexpr (std::is_same_v<M, NoMask>) {
            out[t] = bits;
          } else {
            out[t] = bits & static_cast<Bits>(-static_cast<Bits>(mask[t] != ignore));  // no branch: masks are random
          }
        }
        written = end;
      }
    }
    fill_zero(chunk.size);
  }
}

template <class Use>
auto with_mask_type(MaskType type, Use use) {
  switch (type) {
    case MaskType::kUInt8:
      return use(std::uint8_t{});
    case MaskType::kInt32:
      return use(std::int32_t{});
    case MaskType::kInt64:
      return use(std::int64_t{});
    case MaskType::kFloat32:
      return use(float{});
    case MaskType::kInt8:  // simplify() leaves none
    case MaskType::kNone:
      break;
  }
  return use(NoMask{});
}

template <class Isa, class V>
Kernels reduce_kernels_of(MaskType mask) {
  return with_mask_type(mask, [](auto m) {
    return Kernels{reduce_groups<Isa, V, decltype(m)>, reduce_segments<Isa, V, decltype(m)>};
  });
}

template <class Isa>
Kernels reduce_kernels_of(FloatType value, MaskType mask) {
  switch (value) {
    case FloatType::kFloat16:
      return reduce_kernels_of<Isa, Float16>(mask);
    case FloatType::kBFloat16:
      return reduce_kernels_of<Isa, BFloat16>(mask);
    case FloatType::kFloat32:
      return reduce_kernels_of<Isa, float>(mask);
    case FloatType::kFloat64:
      break;
  }
  return reduce_kernels_of<Isa, double>(mask);
}

inline GatherChunk gather_kernel_of(FloatType out, MaskType mask) {
  return with_mask_type(mask, [out](auto m) -> GatherChunk {
    using M = decltype(m);
    switch (size_of(out)) {
      case 2:
        return gather_chunk<std::uint16_t, M>;
      case 4:
        return gather_chunk<std::uint32_t, M>;
      default:
        return gather_chunk<std::uint64_t, M>;
    }
  });
}

}  // namespace
}  // namespace segscatter::core::detail
