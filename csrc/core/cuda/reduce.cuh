// SPDX-License-Identifier: Apache-2.0
/// Sums by group of one chunk of tokens, and the kernels that make them.
#pragma once

#include "csrc/core/cuda/walk.cuh"

namespace segscatter::core::cuda {

struct ReduceParams {
  WalkParams walk;
  const void* values = nullptr;
  std::int64_t row_stride = 0;
  int num_rows = 0;  ///< K; the grid serves max(K, 1) rows
  bool accumulate = false;
  FloatType sum_type = FloatType::kFloat32;
  void* sums = nullptr;            ///< [K, G]
  std::int64_t* counts = nullptr;  ///< [G]
  // Scratch memory of the paths with several launches. "Sum" is 8 bytes.
  void* partial_sums = nullptr;             ///< kTwoLaunches: Sum [K, G, chunks]
  std::uint32_t* partial_counts = nullptr;  ///< [G, chunks]
  unsigned chunks = 0;
  void* carry_sums = nullptr;  ///< kDocuments, see documents.cuh: Sum [K, warps of all chunks]
  std::uint32_t* carry_counts = nullptr;
  void* piece_sums = nullptr;  ///< Sum [K, S]
  std::uint32_t* piece_counts = nullptr;
  std::uint32_t* unsorted = nullptr;  ///< [chunks]
};

/// What a grid of num_rows * n blocks does in block `index`: rows are neighbours, so that the mask of a chunk comes
/// from memory once.
struct RowAndChunk {
  int row;
  unsigned chunk;
};
SEGSCATTER_DEVICE RowAndChunk split_index(unsigned index, int num_rows) {
  if (num_rows <= 1) return {0, index};
  const unsigned chunk = index / static_cast<unsigned>(num_rows);
  return {static_cast<int>(index - chunk * static_cast<unsigned>(num_rows)), chunk};
}

template <class Value>
SEGSCATTER_DEVICE const Value* row_values(const ReduceParams& p, int row) {
  return static_cast<const Value*>(p.values) + row * p.row_stride;
}

/// Whether rows of values (or outputs) and mask allow 16-byte accesses.
template <class Value, class MaskWord>
SEGSCATTER_DEVICE bool allows_vectors(const WalkParams& p, const Value* row) {
  constexpr std::uintptr_t kMaskPiece = alignof(typename Octet<MaskWord>::Piece);
  const auto offset =
      (reinterpret_cast<std::uintptr_t>(row) & 15) | (reinterpret_cast<std::uintptr_t>(p.mask) & (kMaskPiece - 1));
  return offset == 0 && p.has_values;
}

/// Writes the result of row `row` and group `group`.
SEGSCATTER_DEVICE void write_result(const ReduceParams& p, int row, std::int64_t group, double sum,
                                    std::int64_t count) {
  if (row < p.num_rows) {
    const std::int64_t i = row * p.walk.segments.num_groups + group;
    if (p.sum_type == FloatType::kFloat64) {
      double* to = static_cast<double*>(p.sums) + i;
      *to = p.accumulate ? *to + sum : sum;
    } else {
      float* to = static_cast<float*>(p.sums) + i;
      *to = static_cast<float>(p.accumulate ? *to + sum : sum);
    }
  }
  if (row == 0) p.counts[group] = p.accumulate ? p.counts[group] + count : count;
}

/// A sink that keeps a sum and a count per group in shared memory, in "entries" of 8 + 4 bytes. Code c has row c - 1,
/// so that tokens without a group need no test: they have row 0, which nobody reads.
///
/// kPrivate: every lane has an entry per group, and the one of its current group lives in registers. Rows are 32 sums,
/// then 32 counts. A change of group is a store and a load. Else (many groups): one entry per group for the whole warp,
/// all sums, then all counts. Where groups change, lanes of one group are added up, in lane order, to the entry.
template <bool kPrivate, class Value>
struct GroupSums {
  using Sum = SumOf<Value>;
  using Code = std::uint16_t;
  static constexpr Label kLabel = Label::kGroup;
  static constexpr int kSumStride = kPrivate ? kLanes * 12 : 8;
  static constexpr int kCountStride = kPrivate ? kLanes * 12 : 4;

  unsigned char* entries;  ///< of this warp
  int entry_bytes;
  int lane;
  unsigned char* sums;  ///< this lane's of code 0, which does not exist
  unsigned char* counts;
  Sum sum{};
  std::uint32_t count = 0;  ///< 128 per live token
  int code = kNoLabel;
  Sum* entry_sum = nullptr;  ///< of `code`
  std::uint32_t* entry_count = nullptr;

  SEGSCATTER_DEVICE GroupSums(const WalkParams& p)
      : entries(shared_memory() + p.shared.entries + warp_index() * p.shared.warp_entries),
        entry_bytes(p.shared.warp_entries),
        lane(lane_index()) {
    const int num_codes = static_cast<int>(p.segments.num_groups) + 1;
    sums = entries + (kPrivate ? lane * 8 : 0) - kSumStride;
    counts = entries + (kPrivate ? kLanes * 8 + lane * 4 : num_codes * 8) - kCountStride;
  }

  /// Only says whose sums are to come; the sums themselves are up to the caller.
  SEGSCATTER_DEVICE void begin(int new_code) {
    code = new_code;
    entry_sum = reinterpret_cast<Sum*>(sums + code * kSumStride);
    entry_count = reinterpret_cast<std::uint32_t*>(counts + code * kCountStride);
  }

  SEGSCATTER_DEVICE void prepare() {
    struct alignas(16) Zeros {
      std::uint32_t word[4];
    };
    auto* at = reinterpret_cast<Zeros*>(entries) + lane;
    for (int i = 0; i < entry_bytes; i += kLanes * 16, at += kLanes) *at = Zeros{};
  }

  SEGSCATTER_DEVICE void enter(int new_code) { change(new_code, new_code != code); }

  /// Moves the lanes that `need` it to another code; all lanes call this together.
  SEGSCATTER_DEVICE void change(int new_code, bool need) {
    if constexpr (kPrivate) {
      if (!need) return;
      *entry_sum = sum;
      *entry_count = count;
      begin(new_code);
      sum = *entry_sum;
      count = *entry_count;
    } else {
      if (warp_any(need && count)) add_to_entries(need && count);
      if (!need) return;
      begin(new_code);
      sum = Sum{};
      count = 0;
    }
  }

  /// Adds the sums of the lanes that `need` it to the warp's entries.
  SEGSCATTER_DEVICE void add_to_entries(bool need) {
    Sum total = sum;
    std::uint32_t total_count = count;
    if (add_over_equal(need, code, lane, total, total_count)) {
      entry_sum->add(total);
      *entry_count += total_count;
    }
    warp_barrier();
  }

  SEGSCATTER_DEVICE void add(const Octet<Value>& values, const LiveFlags& live, const Row&) {
    if (!live.any()) return;
    count = live.count(count);
    SEGSCATTER_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) sum.add(select(widen(values[i]), live.word[i / 4], i % 4));
  }

  SEGSCATTER_DEVICE void add_split(const Octet<Value>& values, const LiveFlags& live, const Row& row, int,
                                   int lane_code, const RowStarts<Code>& starts) {
    if (starts[0]) lane_code = starts[0];
    enter(lane_code);
    if (!warp_any(starts.any_later())) {
      add(values, live, row);
      return;
    }
    // `count` leaves out the row's tokens until the end, so that only a change has to count those before it.
    SEGSCATTER_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
      const int start = starts[i];
      if (i && (kPrivate ? start != 0 : warp_any(start != 0))) {
        const std::uint32_t before = live.count_before(i);
        count += before;
        change(start, start != 0);
        count -= before;
      }
      sum.add(select(widen(values[i]), live.word[i / 4], i % 4));
    }
    count = live.count(count);
  }

  SEGSCATTER_DEVICE void finish() {
    if constexpr (kPrivate) {
      *entry_sum = sum;
      *entry_count = count;
    } else {
      change(kNoLabel, true);
    }
  }
};

/// Adds up the entries of all warps of the block, in a fixed order, and hands each group's total to `give(group, sum,
/// count)`. All threads call this, after a barrier.
template <int kThreads, class Value, class Give>
SEGSCATTER_DEVICE void give_private_sums(const WalkParams& p, Give give) {
  constexpr int kWarps = kThreads / kLanes;
  constexpr int kRowBytes = kLanes * 12;
  using Sum = SumOf<Value>;
  struct alignas(16) FourCounts {
    std::uint32_t of[4];
  };
  struct alignas(16) TwoSums {
    Sum of[2];
  };
  // With 16-byte loads, 8 lanes read one warp's counts of a group, and 16 lanes its sums.
  const int lane = lane_index();
  const int stride = p.shared.warp_entries;
  const unsigned char* entries = shared_memory() + p.shared.entries;
  const unsigned char* counts_at = entries + lane / 8 * stride + kLanes * 8 + lane % 8 * 16;
  const unsigned char* sums_at = entries + lane / 16 * stride + lane % 16 * 16;

  const int num_groups = static_cast<int>(p.segments.num_groups);
  for (int group = warp_index(); group < num_groups; group += kWarps) {
    const int row = (group + kFirstLabel - 1) * kRowBytes;
    std::uint32_t count = 0;
    SEGSCATTER_UNROLL
    for (int w = 0; w < kWarps; w += 4) {
      const auto four = *reinterpret_cast<const FourCounts*>(counts_at + row + w * stride);
      count += four.of[0] + four.of[1] + four.of[2] + four.of[3];
    }
    Sum sum{};
    if (warp_any(count != 0)) {  // else nobody met this group
      SEGSCATTER_UNROLL
      for (int w = 0; w < kWarps; w += 2) {
        const auto two = *reinterpret_cast<const TwoSums*>(sums_at + row + w * stride);
        if (w)
          sum.add(two.of[0]);
        else
          sum = two.of[0];
        sum.add(two.of[1]);
      }
      add_over_warp(sum, count);
    }
    if (lane == 0) give(group, sum, count >> kCountShift);
  }
}

template <int kThreads, class Value, class Give>
SEGSCATTER_DEVICE void give_warp_sums(const WalkParams& p, Give give) {
  using Sum = SumOf<Value>;
  const int num_groups = static_cast<int>(p.segments.num_groups);
  const unsigned char* entries = shared_memory() + p.shared.entries;
  for (int group = thread_index(); group < num_groups; group += kThreads) {
    const int entry = group + kFirstLabel - 1;
    Sum sum{};
    std::uint32_t count = 0;
    for (int w = 0; w < kThreads / kLanes; ++w) {
      const unsigned char* warp_entries = entries + w * p.shared.warp_entries;
      sum.add(reinterpret_cast<const Sum*>(warp_entries)[entry]);
      count += reinterpret_cast<const std::uint32_t*>(warp_entries + (num_groups + 1) * 8)[entry];
    }
    give(group, sum, count >> kCountShift);
  }
}

/// The sums of chunk `chunk` by group, handed to `give` by one thread or another of the block.
template <int kThreads, int kRowsAhead, bool kPrivate, class Value, class MaskWord, class BeforeGive, class Give>
SEGSCATTER_DEVICE void reduce_chunk(const ReduceParams& p, int row, std::int64_t chunk, BeforeGive before_give,
                                    Give give) {
  const Value* values = row_values<Value>(p, row);
  GroupSums<kPrivate, Value> sink(p.walk);
  walk_chunk<kThreads, kRowsAhead, Value, MaskWord>(p.walk, values, allows_vectors<Value, MaskWord>(p.walk, values),
                                                    chunk, sink);
  block_barrier();
  before_give();
  if constexpr (kPrivate) {
    give_private_sums<kThreads, Value>(p.walk, give);
  } else {
    give_warp_sums<kThreads, Value>(p.walk, give);
  }
}

/// First of two launches: the sums of every chunk. Grid: max(K, 1) * chunks.
template <bool kPrivate, class Value, class MaskWord>
SEGSCATTER_KERNEL(kPartialPolicy.threads, kPartialPolicy.min_blocks)
reduce_partials(const SEGSCATTER_GRID_CONSTANT ReduceParams p) {
  allow_next_kernel();
  const RowAndChunk at = split_index(block_index(), p.num_rows);
  reduce_chunk<kPartialPolicy.threads, kPartialPolicy.rows_ahead, kPrivate, Value, MaskWord>(
      p, at.row, at.chunk, [] {},
      [&](int group, const SumOf<Value>& sum, std::uint32_t count) {
        const std::int64_t i = static_cast<std::int64_t>(group) * p.chunks + at.chunk;
        const std::int64_t row_size = p.walk.segments.num_groups * p.chunks;
        static_cast<SumOf<Value>*>(p.partial_sums)[at.row * row_size + i] = sum;
        if (at.row == 0) p.partial_counts[i] = count;
      });
}

/// Everything in one launch, by one cluster of blocks per row. Grid: max(K, 1) * blocks of a cluster.
template <bool kPrivate, class Value, class MaskWord>
SEGSCATTER_KERNEL(kOneLaunchPolicy.threads, kOneLaunchPolicy.min_blocks)
reduce_cluster(const SEGSCATTER_GRID_CONSTANT ReduceParams p) {
  using Sum = SumOf<Value>;
  cluster_arrive();  // waited for before the first write to another block's memory, which has to have begun by then
  const unsigned blocks = cluster_blocks();
  const unsigned rank = cluster_rank();
  const int row = static_cast<int>(p.num_rows <= 1 ? 0 : block_index() / blocks);
  const unsigned num_groups = static_cast<unsigned>(p.walk.segments.num_groups);

  // Group g is finished by block g mod blocks. Blocks push, so that the receiver reads its own memory only and nobody
  // has to stay for its sake.
  Sum* inbox = reinterpret_cast<Sum*>(shared_memory() + p.walk.shared.inbox);
  auto* inbox_counts = reinterpret_cast<std::uint32_t*>(inbox + num_groups + blocks);
  reduce_chunk<kOneLaunchPolicy.threads, kOneLaunchPolicy.rows_ahead, kPrivate, Value, MaskWord>(
      p, row, rank, [] { cluster_wait(); },
      [&](int group, const Sum& sum, std::uint32_t count) {
        const unsigned slot = group / blocks * blocks + rank;
        *cluster_shared(inbox + slot, group % blocks) = sum;
        *cluster_shared(inbox_counts + slot, group % blocks) = count;
      });
  cluster_arrive();
  cluster_wait();
  for (unsigned k = thread_index(); k * blocks + rank < num_groups; k += kOneLaunchPolicy.threads) {
    Sum sum{};
    std::int64_t count = 0;
    for (unsigned r = 0; r < blocks; ++r) {
      sum.add(inbox[k * blocks + r]);
      count += inbox_counts[k * blocks + r];
    }
    write_result(p, row, k * blocks + rank, sum.value(), count);
  }
}

}  // namespace segscatter::core::cuda
