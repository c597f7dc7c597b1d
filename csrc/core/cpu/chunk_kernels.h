// SPDX-License-Identifier: Apache-2.0
/// The work on one chunk, written once over `Isa`, which supplies:
///
///     struct Isa {
///       template <class M> static uint64_t live(const M* mask, M ignore);      // bit j: mask[j] != ignore, j < 64
///       template <class V> struct Lanes {                                      // 16 float64 sums in registers
///         Lanes();                                                             // zeros
///         explicit Lanes(const double*);
///         void add(const V* values, uint32_t live);                            // may read all 16 values
///         void store(double*) const;
///         double sum() const;  // one tree: lane j takes lane j + 8, then + 4, + 2, + 1
///       };
///     };
///
/// Every definition adds the same numbers to the same lanes in the same order, so all give the same bits. (A dead
/// token's +0.0 changes nothing: a lane starts at +0.0 and a sum is -0.0 only if both operands are.)
///
/// Which way a document goes depends on offsets and chunks only. Per block of documents, by their mean length:
///   up to kTinyDocument     token by token                              lane: position in the chunk mod 16
///   up to kShortDocument    16 or 32 tokens a step, from its begin on   lane: position in the document's piece mod 16
///   above                   aligned windows of 16 tokens                lane: position in the chunk mod 16
/// Tokens come to a lane in order; sum() adds the lanes where a group's chunk ends. Where every document has a sum of
/// its own, sum() ends the document's piece, and tiny documents need no lanes.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "documents.h"
#include "half.h"
#include "kernels.h"
#include "segment_sums.h"

namespace segscatter::core::detail {
namespace {  // included by files compiled for different instruction sets, which must not share functions

struct NoMask {};

template <class M>
M ignored_value(const Mask& mask) {
  if constexpr (std::is_same_v<M, NoMask>) {
    return {};
  } else {
    return static_cast<M>(mask.ignore_index);
  }
}

inline std::uint64_t little_endian(std::uint64_t x) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  return __builtin_bswap64(x);
#else
  return x;
#endif
}

inline void set_live_block(const LiveTokens& live, std::uint32_t block, std::uint64_t bits) {
  bits = little_endian(bits);
  std::memcpy(live.bytes + block * sizeof(bits), &bits, sizeof(bits));
}
/// Bit j < 57 (all, where `first` is a multiple of 8): token `first` + j is live.
inline std::uint64_t live_from(const LiveTokens& live, std::uint32_t first) {
  std::uint64_t bits;
  std::memcpy(&bits, live.bytes + first / 8, sizeof(bits));
  return little_endian(bits) >> first % 8;
}
inline bool is_live(const LiveTokens& live, std::uint32_t token) {
  return live.bytes[token / 8] >> token % 8 & 1;
}

template <class Isa, class M>
void find_live(const Mask& mask, const Chunk& chunk, const LiveTokens& live) {
  constexpr std::uint32_t kBlock = LiveTokens::kBlock;
  const std::uint32_t full = chunk.size / kBlock, left = chunk.size % kBlock;
  set_live_block(live, full, 0);
  set_live_block(live, full + 1, 0);
  if constexpr (std::is_same_v<M, NoMask>) {
    for (std::uint32_t b = 0; b < full; ++b) set_live_block(live, b, ~std::uint64_t{0});
    if (left != 0) set_live_block(live, full, (std::uint64_t{1} << left) - 1);
  } else {
    const M ignore = ignored_value<M>(mask);
    const M* data = static_cast<const M*>(mask.data) + chunk.begin;
    for (std::uint32_t b = 0; b < full; ++b) set_live_block(live, b, Isa::live(data + b * kBlock, ignore));
    if (left == 0) return;
    M last[kBlock];
    for (std::uint32_t j = 0; j < kBlock; ++j) last[j] = j < left ? data[full * kBlock + j] : ignore;
    set_live_block(live, full, Isa::live(last, ignore));
  }
}

/// One row of a chunk in windows of 16 tokens that can be read whole: the last ones are copied to where that is so.
template <class V>
class Windows {
 public:
  Windows(const V* values, std::uint32_t size, const LiveTokens& live)
      : values_(values), live_(live), copied_from_(size / kLanes < 2 ? 0 : size / kLanes - 2) {
    const std::uint32_t begin = copied_from_ * kLanes;
    std::memcpy(last_, values + begin, (size - begin) * sizeof(V));
  }

  const V* values(std::uint32_t window) const {
    return window < copied_from_ ? full_values(window) : last_ + (window - copied_from_) * kLanes;
  }
  const V* full_values(std::uint32_t window) const { return values_ + window * kLanes; }
  std::uint32_t live(std::uint32_t window) const { return live_bits(window * kLanes) & 0xffff; }
  /// As live_from().
  std::uint64_t live_bits(std::uint32_t token) const { return live_from(live_, token); }

  /// The processor's own prefetching ends at every page; this bridges it where memory is the limit.
  void prefetch(std::uint32_t token) const { __builtin_prefetch(values_ + token + 1024); }

  /// 32 tokens from one on; behind the chunk's last one come zeros.
  const V* from(std::int32_t token) const {
    const std::int32_t copied = copied_from_ * kLanes;
    return token < copied ? values_ + token : last_ + (token - copied);
  }

 private:
  const V* values_;
  const LiveTokens live_;
  const std::uint32_t copied_from_;
  V last_[5 * kLanes] = {};
};

/// Adds the tokens [begin, end), at least one, in aligned windows; returns how many are live.
template <class Lanes, class V>
[[gnu::always_inline]] inline std::int64_t add_long(Lanes& sums, const Windows<V>& windows, std::uint32_t begin,
                                                    std::uint32_t end) {
  const std::uint32_t first = begin / kLanes, last = (end - 1) / kLanes;
  const std::uint32_t from_begin = 0xffffu << begin % kLanes, to_end = 0xffffu >> (0 - end) % kLanes;
  std::uint32_t live = windows.live(first) & from_begin;
  std::int64_t count = 0;
  if (first != last) {
    sums.add(windows.values(first), live);
    count = __builtin_popcount(live);
    std::uint32_t window = first + 1;
    for (; window + 4 <= last; window += 4) {
      const std::uint64_t four = windows.live_bits(window * kLanes);
      if (four == 0) continue;  // prompts and padding are long runs of dead tokens
      for (int j = 0; j < 4; ++j) {
        windows.prefetch((window + j) * kLanes);
        sums.add(windows.full_values(window + j), static_cast<std::uint32_t>(four >> kLanes * j) & 0xffff);
      }
      count += __builtin_popcountll(four);
    }
    for (; window < last; ++window) {
      live = windows.live(window);
      sums.add(windows.full_values(window), live);
      count += __builtin_popcount(live);
    }
    live = windows.live(last);
  }
  live &= to_end;
  sums.add(windows.values(last), live);
  return count + __builtin_popcount(live);
}

inline void clear_lanes(double* lanes) {
  for (int j = 0; j < kLanes; ++j) lanes[j] = 0.0;
}

/// Adds the tokens [begin, end), maybe none, kWindows * 16 at a time; returns how many are live. The last step asks
/// nothing: a document that fits into one has no branch to be mispredicted.
template <int kWindows, class Lanes, class V>
[[gnu::always_inline]] inline std::int64_t add_short(Lanes& sums, const Windows<V>& windows, std::int32_t begin,
                                                     std::int32_t end) {
  constexpr std::int32_t kStep = kWindows * kLanes;
  const auto add = [&](std::uint64_t live) __attribute__((always_inline)) {
    const V* values = windows.from(begin);
    for (int j = 0; j < kWindows; ++j) {
      sums.add(values + kLanes * j, static_cast<std::uint32_t>(live >> kLanes * j) & 0xffff);
    }
    return __builtin_popcountll(live);
  };
  std::int64_t count = 0;
  for (; end - begin > kStep; begin += kStep) {
    for (int j = 0; j < kWindows; ++j) windows.prefetch(begin + kLanes * j);
    count += add(windows.live_bits(begin) & ((std::uint64_t{1} << kStep) - 1));
  }
  return count + add(windows.live_bits(begin) & ((std::uint64_t{1} << (end - begin)) - 1));
}

/// The groups of one chunk: every group that occurs has 16 lanes, so a document costs no horizontal sum. Few groups are
/// entered all at once, in order, and then an id is its own entry.
template <class Lanes>
class GroupTable {
 public:
  GroupTable(const Segments& segments, const GroupScratch& scratch, ChunkGroups& out)
      : segments_(segments),
        scratch_(scratch),
        out_(out),
        all_entered_(segments.num_groups <= out.capacity && segments.num_groups <= kFewGroups) {
    out_.size = 0;
    clear(static_cast<std::int32_t>(out_.capacity));  // subnormal numbers there would be slow to add to
    if (all_entered_) {
      for (std::int64_t group = 0; group < segments.num_groups; ++group) enter(group);
    }
  }
  ~GroupTable() {
    for (std::int32_t entry = 0; entry < out_.size; ++entry) scratch_.entries[out_.groups[entry]] = -1;
  }
  GroupTable(const GroupTable&) = delete;
  GroupTable& operator=(const GroupTable&) = delete;

  /// The entry of each segment in a block.
  void find(const DocumentBlock& documents, std::int32_t* entries) {
    if (segments_.group_ids.type == IndexType::kInt64) {
      find(static_cast<const std::int64_t*>(segments_.group_ids.data), documents, entries);
    } else {
      find(static_cast<const std::int32_t*>(segments_.group_ids.data), documents, entries);
    }
  }
  double* lanes(std::int32_t entry) const { return scratch_.lanes + static_cast<std::int64_t>(entry) * kLanes; }

  /// Hands out one row's sums, and the counts with the first row's.
  void finish_row(std::int64_t row, bool last) {
    double* sums = out_.sums + row * out_.capacity;
    for (std::int32_t entry = 0; entry < out_.size; ++entry) {
      sums[entry] = Lanes(lanes(entry)).sum();
      if (row == 0) out_.counts[entry] = scratch_.counts[entry];
      if (!last) clear_lanes(lanes(entry));
    }
  }

 private:
  template <class Id>
  void find(const Id* ids, const DocumentBlock& documents, std::int32_t* entries) {
    ids += documents.segment(0);
    const int count = documents.count();
    const std::uint64_t num_groups = static_cast<std::uint64_t>(segments_.num_groups);
    const std::int32_t dropped = static_cast<std::int32_t>(out_.capacity);
    if (all_entered_) {  // without a table this vectorises
      for (int i = 0; i < count; ++i) {
        const std::int64_t group = ids[i];
        entries[i] = static_cast<std::uint64_t>(group) < num_groups ? static_cast<std::int32_t>(group) : dropped;
      }
      return;
    }
    const std::int32_t* table = scratch_.entries;
    for (int i = 0; i < count; ++i) {
      const std::int64_t group = ids[i];
      const bool valid = static_cast<std::uint64_t>(group) < num_groups;
      std::int32_t entry = valid ? table[group] : dropped;
      if (entry < 0) entry = enter(group);
      entries[i] = entry;
    }
  }
  std::int32_t enter(std::int64_t group) {
    const std::int32_t entry = scratch_.entries[group] = out_.size++;
    out_.groups[entry] = group;
    clear(entry);
    return entry;
  }
  void clear(std::int32_t entry) {
    scratch_.counts[entry] = 0;
    clear_lanes(lanes(entry));
  }

  static constexpr std::int64_t kFewGroups = 32;

  const Segments& segments_;
  const GroupScratch& scratch_;
  ChunkGroups& out_;
  const bool all_entered_;
};

constexpr std::int32_t kTinyDocument = 3;     ///< tokens, on average
constexpr std::int32_t kShortDocument = 256;  ///< tokens, on average
constexpr std::int32_t kOneWindow = 12;       ///< tokens, on average, of short documents that go in steps of one window

/// Many tiny documents, token by token. No branch depends on a document's length: each writes its entry to 8 tokens
/// from its first on, and the next ones overwrite what is theirs. Entries have 16 bits, which a table must fit.
class TinyDocuments {
 public:
  static constexpr int kCopies = 8;

  TinyDocuments(const DocumentBlock& documents, const std::int32_t* entries)
      : begin_(documents.begin(0)), end_(documents.end(documents.count() - 1)) {
    const int count = documents.count();
    for (int i = 0; i < count; ++i) {
      std::uint16_t* entry = entry_ + (documents.begin(i) - documents.begin(0));
      const std::uint16_t* end = entry_ + (documents.end(i) - documents.begin(0));
      std::uint16_t copies[kCopies];
      for (int j = 0; j < kCopies; ++j) copies[j] = static_cast<std::uint16_t>(entries[i]);
      do {
        std::memcpy(entry, copies, sizeof(copies));
        entry += kCopies;
      } while (entry < end);
    }
  }

  template <class V>
  void add_to(const GroupScratch& to, const V* values, const LiveTokens& live) const {
    constexpr std::uint32_t kBlock = LiveTokens::kBlock;
    double* lanes = to.lanes;
    std::int64_t* counts = to.counts;
    for (std::uint32_t block = begin_ / kBlock; block * kBlock < end_; ++block) {
      const std::uint32_t first = block * kBlock;
      std::uint64_t bits = live_from(live, first);
      if (first < begin_) bits &= ~std::uint64_t{0} << (begin_ - first);
      if (end_ - first < kBlock) bits &= (std::uint64_t{1} << (end_ - first)) - 1;
      for (; bits != 0; bits &= bits - 1) {
        const std::size_t t = first + __builtin_ctzll(bits);
        const std::size_t entry = entry_[t - begin_];
        lanes[entry * kLanes + t % kLanes] += to_double(values[t]);
        ++counts[entry];
      }
    }
  }

 private:
  const std::uint32_t begin_, end_;
  std::uint16_t entry_[DocumentBlock::kCapacity * (kTinyDocument + 1) + kCopies];
};

// Not inlined: the loops need all registers. Copies of what they read: a store to the lanes might change the originals,
// for all that the compiler knows.
template <int kWindows, class Lanes, class V>
[[gnu::noinline]] void add_short_documents(const DocumentBlock& documents, const std::int32_t* entries,
                                           const GroupScratch& to, const Windows<V>& windows) {
  const GroupScratch out = to;
  const Windows<V> row = windows;
  const int count = documents.count();
  for (int i = 0; i < count; ++i) {
    const std::int64_t entry = entries[i];
    Lanes sums(out.lanes + entry * kLanes);
    out.counts[entry] += add_short<kWindows>(sums, row, documents.begin(i), documents.end(i));
    sums.store(out.lanes + entry * kLanes);
  }
}

template <class Lanes, class V>
[[gnu::noinline]] void add_long_documents(const DocumentBlock& documents, const std::int32_t* entries,
                                          const GroupScratch& to, const Windows<V>& windows) {
  const int count = documents.count();
  for (int i = 0; i < count; ++i) {
    const std::int32_t begin = documents.begin(i), end = documents.end(i);
    if (begin == end) continue;
    double* lanes = to.lanes + static_cast<std::int64_t>(entries[i]) * kLanes;
    Lanes sums(lanes);
    to.counts[entries[i]] += add_long(sums, windows, begin, end);
    sums.store(lanes);
  }
}

/// Groups by table.
template <class Isa, class V>
void reduce_groups(const ReduceArgs& args, const Chunk& chunk, const LiveTokens& live, const GroupScratch& scratch,
                   ChunkGroups& out) {
  using Lanes = typename Isa::template Lanes<V>;
  GroupTable<Lanes> table(args.segments, scratch, out);
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const V* values = static_cast<const V*>(args.values) + row * args.row_stride + chunk.begin;
    const Windows<V> windows(values, chunk.size, live);
    DocumentBlock documents(args.segments, chunk);
    while (documents.advance()) {
      std::int32_t entries[DocumentBlock::kCapacity];
      table.find(documents, entries);
      const std::int32_t mean = documents.mean_size();
      if (mean <= kTinyDocument) {
        TinyDocuments(documents, entries).add_to(scratch, values, live);
      } else if (mean <= kOneWindow) {
        add_short_documents<1, Lanes>(documents, entries, scratch, windows);
      } else if (mean <= kShortDocument) {
        add_short_documents<2, Lanes>(documents, entries, scratch, windows);
      } else {
        add_long_documents<Lanes>(documents, entries, scratch, windows);
      }
    }
    table.finish_row(row, row + 1 == args.num_rows);
  }
}

struct PieceSum {
  double sum;
  std::int64_t count;
};

/// Tokens [begin, end), at least one; `mean` as above decides, and few tokens are added one after the other.
template <class Lanes, class V>
PieceSum sum_piece(const V* values, const LiveTokens& live, const Windows<V>& windows, std::int32_t begin,
                   std::int32_t end, std::int32_t mean) {
  if (mean <= kTinyDocument) {
    PieceSum piece{0.0, 0};
    for (std::int32_t t = begin; t < end; ++t) {
      const bool counts = is_live(live, t);
      piece.sum += counts ? to_double(values[t]) : 0.0;
      piece.count += counts;
    }
    return piece;
  }
  Lanes lanes;
  const std::int64_t count =
      mean <= kShortDocument ? add_short<1>(lanes, windows, begin, end) : add_long(lanes, windows, begin, end);
  return {lanes.sum(), count};
}

/// Documents one by one: no table, so the number of groups does not matter.
template <class Isa, class V>
void reduce_segments(const ReduceArgs& args, const Chunk& chunk, const LiveTokens& live, const SegmentSums& out,
                     ChunkPieces& pieces) {
  const std::int64_t chunk_end = chunk.begin + chunk.size;
  for (std::int64_t row = 0; row < args.num_rows; ++row) {
    const V* values = static_cast<const V*>(args.values) + row * args.row_stride + chunk.begin;
    const Windows<V> windows(values, chunk.size, live);
    DocumentBlock documents(args.segments, chunk);
    pieces.size = 0;
    while (documents.advance()) {
      const std::int32_t mean = documents.mean_size();
      for (int i = 0; i < documents.count(); ++i) {
        const std::int32_t begin = documents.begin(i), end = documents.end(i);
        if (begin == end) continue;
        const std::int64_t segment = documents.segment(i);
        const PieceSum piece = sum_piece<typename Isa::template Lanes<V>>(values, live, windows, begin, end, mean);
        const auto bound = [&](std::int64_t d) {
          return local_offset(args.segments.map, load_index(args.segments.offsets, d));
        };
        const bool whole =
            (begin > 0 || bound(segment) >= chunk.begin) && (end < chunk.size || bound(segment + 1) <= chunk_end);
        if (whole) {
          add_sum(out, row * args.segments.num_segments + segment, piece.sum);
          if (row == 0) add_count(out, segment, piece.count);
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

template <class Isa, class V, class Bits>
Kernels kernels_of(MaskType mask) {
  return with_mask_type(mask, [](auto m) {
    using M = decltype(m);
    return Kernels{find_live<Isa, M>, reduce_groups<Isa, V>, reduce_segments<Isa, V>, gather_chunk<Bits, M>};
  });
}

template <class Isa>
Kernels kernels_of(FloatType type, MaskType mask) {
  switch (type) {
    case FloatType::kFloat16:
      return kernels_of<Isa, Float16, std::uint16_t>(mask);
    case FloatType::kBFloat16:
      return kernels_of<Isa, BFloat16, std::uint16_t>(mask);
    case FloatType::kFloat32:
      return kernels_of<Isa, float, std::uint32_t>(mask);
    case FloatType::kFloat64:
      break;
  }
  return kernels_of<Isa, double, std::uint64_t>(mask);
}

}  // namespace
}  // namespace segscatter::core::detail
