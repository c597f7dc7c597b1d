// SPDX-License-Identifier: Apache-2.0
/// Sums by document, then by group: for more groups than shared memory holds. No atomics, and one writer per address:
///
///   carry [warp]       what a warp found before the first document that starts inside its run of tokens
///   piece [document]   what the warp in whose run the document starts found of it, unless it starts with the run
///
/// So a document from b to e is its piece (where b is no multiple of the run) and the carries of the runs that begin in
/// [b, e). All of that has been written if the offsets never decrease, which the first kernel checks: where they do,
/// every result is zero.
#pragma once

#include "csrc/core/cuda/reduce.cuh"

namespace segscatter::core::cuda {

constexpr int kDocumentWarps = kDocumentPolicy.warps();

/// A sink that writes carries and pieces.
template <class Value>
struct DocumentSums {
  using Sum = SumOf<Value>;
  using Code = std::uint32_t;
  static constexpr Label kLabel = Label::kDocument;

  Sum* carry;  ///< of this warp
  Sum* pieces;
  std::uint32_t* carry_count;
  std::uint32_t* piece_counts;
  int row;  ///< the blocks of row 0 write the counts
  int lane;
  Sum sum{};                ///< this lane's, of the document that the warp is in
  std::uint32_t count = 0;  ///< 128 per live token
  int code = kNoLabel;
  bool carried = false;  ///< the carry has been written

  SEGSCATTER_DEVICE DocumentSums(const ReduceParams& p, int row, unsigned chunk) : row(row), lane(lane_index()) {
    const std::int64_t warps = static_cast<std::int64_t>(p.chunks) * kDocumentWarps;
    const std::int64_t warp = static_cast<std::int64_t>(chunk) * kDocumentWarps + warp_index();
    carry = static_cast<Sum*>(p.carry_sums) + row * warps + warp;
    pieces = static_cast<Sum*>(p.piece_sums) + row * p.walk.segments.num_segments;
    carry_count = p.carry_counts + warp;
    piece_counts = p.piece_counts;
  }

  SEGSCATTER_DEVICE void prepare() {}
  SEGSCATTER_DEVICE void begin(int new_code) { code = new_code; }
  SEGSCATTER_DEVICE void enter(int new_code) {
    if (new_code == code) return;
    close();
    code = new_code;
  }

  SEGSCATTER_DEVICE void write_piece(int document_code, const Sum& piece, std::uint32_t piece_count) const {
    if (document_code < kFirstLabel) return;
    pieces[document_code - kFirstLabel] = piece;
    if (row == 0) piece_counts[document_code - kFirstLabel] = piece_count >> kCountShift;
  }

  /// Writes what all lanes have of the warp's document, and begins anew.
  SEGSCATTER_DEVICE void close() {
    add_over_warp(sum, count);
    if (lane == 0) {
      if (carried) {
        write_piece(code, sum, count);
      } else {
        *carry = sum;
        if (row == 0) *carry_count = count >> kCountShift;
      }
    }
    carried = true;
    sum = Sum{};
    count = 0;
  }

  SEGSCATTER_DEVICE void add(const Octet<Value>& values, const LiveFlags& live, const Row&) {
    if (!live.any()) return;
    count = live.count(count);
    SEGSCATTER_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) sum.add(select(widen(values[i]), live.word[i / 4], i % 4));
  }

  SEGSCATTER_DEVICE void add_split(const Octet<Value>& values, const LiveFlags& live, const Row&, int row_code, int,
                                   const RowStarts<Code>& starts) {
    enter(row_code);
    // The lane's tokens: a head that belongs to a document of an earlier lane, whole documents, which are written, and
    // a tail that may go on in later lanes.
    Sum head{};
    Sum run{};
    std::uint32_t head_count = 0;
    std::uint32_t counted = 0;
    int open = 0;  // code of the lane's last start
    SEGSCATTER_UNROLL
    for (int i = 0; i < kLaneTokens; ++i) {
      if (starts[i]) {
        const std::uint32_t before = live.count_before(i);
        if (open) {
          write_piece(open, run, before - counted);
        } else {
          head = run;
          head_count = before;
        }
        open = starts[i];
        run = Sum{};
        counted = before;
      }
      run.add(select(widen(values[i]), live.word[i / 4], i % 4));
    }
    const std::uint32_t run_count = live.count() - counted;
    if (!open) {
      head = run;
      head_count = run_count;
    }

    const std::uint32_t starters = warp_ballot(open != 0);
    const int first = starters ? lowest_one(starters) : kLanes;
    if (lane <= first) {
      sum.add(head);
      count += head_count;
    }
    if (!starters) return;  // garbage
    close();
    if (starters & (starters - 1)) write_crossing(starters, open, run, run_count, head, head_count);

    const int last = 31 - leading_zeros(starters);
    code = shuffle(open, last);  // this document goes on, and its parts stay where they are
    if (lane == last) {
      sum = run;
      count = run_count;
    } else if (lane > last) {
      sum = head;
      count = head_count;
    }
  }

  /// Documents that start in one lane (all `starters` but the last) and end in the head of the next starter: adds tail
  /// and heads up in lane order, by a tree.
  SEGSCATTER_DEVICE void write_crossing(std::uint32_t starters, int open, const Sum& tail, std::uint32_t tail_count,
                                        const Sum& head, std::uint32_t head_count) const {
    const std::uint32_t above = starters & ~((2u << lane) - 1);
    const int stop = above ? lowest_one(above) : lane;  // lanes [lane, stop) hold this document's parts
    Sum part = shuffle_down(head, 1);
    std::uint32_t part_count = shuffle_down(head_count, 1);
    if (open) {
      Sum both = tail;
      both.add(part);
      part = both;
      part_count += tail_count;
    }
    SEGSCATTER_UNROLL
    for (int distance = 1; distance < kLanes; distance *= 2) {
      const Sum other = shuffle_down(part, distance);
      const std::uint32_t other_count = shuffle_down(part_count, distance);
      if (lane + distance < stop) {
        part.add(other);
        part_count += other_count;
      }
    }
    if (open && above) write_piece(open, part, part_count);
  }

  SEGSCATTER_DEVICE void finish() { close(); }
};

/// First kernel: carries, pieces, and whether this block's share of the offsets is sorted. Grid: max(K, 1) * chunks.
template <class Value, class MaskWord>
SEGSCATTER_KERNEL(kDocumentPolicy.threads, kDocumentPolicy.min_blocks)
reduce_documents(const SEGSCATTER_GRID_CONSTANT ReduceParams p) {
  allow_next_kernel();
  const RowAndChunk at = split_index(block_index(), p.num_rows);
  const Value* values = row_values<Value>(p, at.row);
  DocumentSums<Value> sink(p, at.row, at.chunk);
  walk_chunk<kDocumentPolicy.threads, kDocumentPolicy.rows_ahead, Value, MaskWord>(
      p.walk, values, allows_vectors<Value, MaskWord>(p.walk, values), at.chunk, sink);

  if (at.row != 0) return;
  bool unsorted = false;
  const std::int64_t step = static_cast<std::int64_t>(p.chunks) * kDocumentPolicy.threads;
  for (std::int64_t d = at.chunk * kDocumentPolicy.threads + thread_index(); d < p.walk.segments.num_segments;
       d += step) {
    unsorted |= load_offset(p.walk, d) > load_offset(p.walk, d + 1);
  }
  unsorted = block_any(unsorted);
  if (thread_index() == 0) p.unsorted[at.chunk] = unsorted;
}

template <class Sum>
struct DocumentTotal {
  Sum sum{};
  std::int64_t count = 0;
};

/// The total of document `document` of the calling lane; an empty one for a negative number. All lanes of the warp call
/// this together, because they share the work on long documents.
template <class Sum>
SEGSCATTER_DEVICE DocumentTotal<Sum> document_total(const ReduceParams& p, int row, std::int64_t document) {
  const int lane = lane_index();
  const std::int64_t warps = static_cast<std::int64_t>(p.chunks) * kDocumentWarps;
  const Sum* carries = static_cast<const Sum*>(p.carry_sums) + row * warps;
  DocumentTotal<Sum> total;
  std::int64_t from = 0;
  std::int64_t to = 0;
  if (document >= 0) {
    const std::int64_t begin = detail::clamp(load_offset(p.walk, document), 0, p.walk.num_tokens);
    const std::int64_t end = detail::clamp(load_offset(p.walk, document + 1), 0, p.walk.num_tokens);
    const std::int64_t run = p.walk.warp_tokens;
    from = (begin + run - 1) / run;
    to = (end + run - 1) / run;
    if (begin < end && from * run != begin) {
      total.sum = (static_cast<const Sum*>(p.piece_sums) + row * p.walk.segments.num_segments)[document];
      total.count = p.piece_counts[document];
    }
  }
  const bool is_long = to - from > kLanes;
  if (!is_long) {
    for (std::int64_t w = from; w < to; ++w) {
      total.sum.add(carries[w]);
      total.count += p.carry_counts[w];
    }
  }
  for (std::uint32_t left = warp_ballot(is_long); left; left &= left - 1) {
    const int owner = lowest_one(left);
    const std::int64_t owner_to = shuffle(to, owner);
    Sum sum{};
    std::int64_t count = 0;
    for (std::int64_t w = shuffle(from, owner) + lane; w < owner_to; w += kLanes) {
      sum.add(carries[w]);
      count += p.carry_counts[w];
    }
    add_over_warp(sum, count);
    if (lane == owner) {
      total.sum.add(sum);
      total.count += count;
    }
  }
  return total;
}

/// Whether any block of the first kernel met a decreasing offset. All threads of the block call this.
SEGSCATTER_DEVICE bool any_unsorted(const ReduceParams& p) {
  bool unsorted = false;
  for (unsigned c = thread_index(); c < p.chunks; c += block_threads()) unsorted |= p.unsorted[c] != 0;
  return block_any(unsorted);
}

/// Second kernel where group d is document d. Grid: max(K, 1) * G / threads.
template <class Sum>
SEGSCATTER_KERNEL(kDocumentOutputThreads, 1)
combine_documents(const SEGSCATTER_GRID_CONSTANT ReduceParams p) {
  const RowAndChunk at = split_index(block_index(), p.num_rows);
  const std::int64_t group = static_cast<std::int64_t>(at.chunk) * kDocumentOutputThreads + thread_index();
  wait_for_previous_kernel();
  const bool sorted = !any_unsorted(p);
  const bool exists = sorted && group < p.walk.segments.num_segments && group < p.walk.segments.num_groups;
  const DocumentTotal<Sum> total = document_total<Sum>(p, at.row, exists ? group : -1);
  if (group < p.walk.segments.num_groups) write_result(p, at.row, group, total.sum.value(), total.count);
}

/// Second kernel otherwise. A block owns kGroupRange groups, with sums of its own in every warp; each warp goes through
/// its share of all documents, in order, and picks those of the block's groups. Grid: max(K, 1) * G / kGroupRange.
template <class Sum>
SEGSCATTER_KERNEL(kGroupRangeThreads, 1)
combine_documents_by_group(const SEGSCATTER_GRID_CONSTANT ReduceParams p) {
  constexpr int kWarps = kGroupRangeThreads / kLanes;
  constexpr int kBatches = 4;  // of 32 ids, loaded together
  const int warp = warp_index();
  const int lane = lane_index();
  const RowAndChunk at = split_index(block_index(), p.num_rows);
  const std::int64_t first_group = static_cast<std::int64_t>(at.chunk) * kGroupRange;
  const int num_groups = static_cast<int>(minimum<std::int64_t>(p.walk.segments.num_groups - first_group, kGroupRange));
  Sum* sums = reinterpret_cast<Sum*>(shared_memory());  // [warp][group]
  auto* counts = reinterpret_cast<std::int64_t*>(sums + kWarps * kGroupRange);
  static_assert(kWarps * kGroupRange % kGroupRangeThreads == 0, "every thread clears as many");
  for (int i = 0; i < kWarps * kGroupRange / kGroupRangeThreads; ++i) {
    sums[i * kGroupRangeThreads + thread_index()] = Sum{};
    counts[i * kGroupRangeThreads + thread_index()] = 0;
  }
  wait_for_previous_kernel();
  const std::int64_t num_documents = any_unsorted(p) ? 0 : p.walk.segments.num_segments;  // a barrier, too

  const std::int64_t share = (num_documents + kWarps - 1) / kWarps;
  const std::int64_t end = minimum<std::int64_t>((warp + 1) * share, num_documents);
  const auto group_in_range = [&](std::int64_t document) {  // negative: not this block's
    const std::int64_t id = document < end ? detail::load_index(p.walk.segments.group_ids, document) : -1;
    return id >= first_group && id < first_group + num_groups ? static_cast<int>(id - first_group) : -1;
  };
  for (std::int64_t begin = warp * share; begin < end; begin += kBatches * kLanes) {
    bool any = false;
    SEGSCATTER_UNROLL
    for (int b = 0; b < kBatches; ++b) any |= group_in_range(begin + b * kLanes + lane) >= 0;
    if (!warp_any(any)) continue;
    for (int b = 0; b < kBatches; ++b) {
      const std::int64_t document = begin + b * kLanes + lane;
      const int group = group_in_range(document);
      if (!warp_any(group >= 0)) continue;
      DocumentTotal<Sum> total = document_total<Sum>(p, at.row, group >= 0 ? document : -1);
      if (add_over_equal(group >= 0, group + 1, lane, total.sum, total.count)) {
        sums[warp * kGroupRange + group].add(total.sum);
        counts[warp * kGroupRange + group] += total.count;
      }
      warp_barrier();
    }
  }
  block_barrier();
  for (int group = thread_index(); group < num_groups; group += kGroupRangeThreads) {
    Sum sum{};
    std::int64_t count = 0;
    for (int w = 0; w < kWarps; ++w) {
      sum.add(sums[w * kGroupRange + group]);
      count += counts[w * kGroupRange + group];
    }
    write_result(p, at.row, first_group + group, sum.value(), count);
  }
}

}  // namespace segscatter::core::cuda
