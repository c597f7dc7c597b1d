// SPDX-License-Identifier: Apache-2.0
/// The front end of all kernels: which document has each token.
///
/// A chunk is the run of tokens of a block; every warp walks its own part of it, a row of 256 tokens at a time, and
/// never waits for the other warps. What is done with the tokens is up to a sink:
///
///     using Code = ...;                                   // uint16_t or uint32_t: what fits the codes below
///     static constexpr Label kLabel = ...;
///     void prepare();                                     // the first tokens have been asked for, none has come
///     void begin(int code);                               // code of the warp's first token
///     void enter(int code);                               // all tokens until further notice have this code
///     void add(Octet<Value>, LiveFlags, Row);             // a row in which no document starts
///     void add_split(Octet<Value>, LiveFlags, Row, int row_code, int lane_code, RowStarts<Code>);
///     void finish();                                      // no more tokens; not called for a warp that has none
///
/// A code names a label: 1 = none, n + 2 = group n or document n. Code 0 means "no document starts here".
#pragma once

#include "csrc/core/cuda/tokens.cuh"
#include "csrc/core/segments.h"
#include "segscatter/plan.h"

namespace segscatter::core::cuda {

/// What a document's code is made from.
enum class Label { kGroup, kDocument };
constexpr int kNoLabel = 1;
constexpr int kFirstLabel = 2;

/// "Beyond every token of this chunk". Chunks have at most 2^24 tokens.
constexpr int kFarAway = 1 << 30;

/// Dynamic shared memory of a block: kPivots pivots, then start codes of every warp's row, then the sink's own.
struct WalkParams {
  Segments segments;
  // What the kernels branch on, as 32-bit numbers, which instructions read straight from the parameters.
  int offset_bytes = 8;  ///< of one element, 4 or 8; 0: as segments.offsets says, and through segments.map
  int id_bytes = 8;      ///< of one element, 4 or 8; 0: segment d is group d
  std::int64_t num_tokens = 0;
  int has_mask = 0;
  int has_values = 1;          ///< 0: only counts are wanted
  const void* mask = nullptr;  ///< some address that is not read where there is no mask
  MaskTest test;
  int warp_tokens = 0;  ///< a multiple of kRowTokens
  int pivot_shift = 0;  ///< num_segments >> pivot_shift < kPivots
  int top_shift = 0;    ///< 1 << top_shift > num_segments
  SharedLayout shared;
};

/// Document boundary `d`, as an offset among the tokens held here; it may lie before the first or past the last one.
SEGSCATTER_DEVICE std::int64_t load_offset(const WalkParams& p, std::int64_t d) {
  const IndexArray& offsets = p.segments.offsets;
  if (p.offset_bytes == 4) return static_cast<const std::int32_t*>(offsets.data)[d];
  if (p.offset_bytes == 8) return static_cast<const std::int64_t*>(offsets.data)[d];
  return detail::local_offset(p.segments.map, detail::load_index(offsets, d));
}

/// The group of document `d`. Any number where the ids are garbage.
SEGSCATTER_DEVICE std::int64_t load_group(const WalkParams& p, std::int64_t d) {
  const void* ids = p.segments.group_ids.data;
  if (p.id_bytes == 4) return static_cast<const std::int32_t*>(ids)[d];
  if (p.id_bytes == 8) return static_cast<const std::int64_t*>(ids)[d];
  return d;
}

/// A row of a warp.
struct Row {
  int begin;        ///< its first token, counted from the chunk's
  int lane_tokens;  ///< how many of the lane's eight exist; may be negative or more
  bool vector;      ///< all exist, and 16-byte accesses are allowed
};

/// Codes of the documents that start at a lane's eight tokens.
template <class Code>
struct RowStarts;

template <>
struct RowStarts<std::uint16_t> {
  struct alignas(16) Words {
    std::uint32_t word[4];
  };
  Words words = {};

  SEGSCATTER_DEVICE int operator[](int i) const {
    return i % 2 ? words.word[i / 2] >> 16 : words.word[i / 2] & 0xffffu;
  }
  /// Whether a document starts at any token but the lane's first.
  SEGSCATTER_DEVICE bool any_later() const {
    return (words.word[0] >> 16 | words.word[1] | words.word[2] | words.word[3]) != 0;
  }
  /// The code of the last start; 0 if there is none.
  SEGSCATTER_DEVICE int last() const {
    std::uint32_t word = words.word[1] ? words.word[1] : words.word[0];
    word = words.word[2] ? words.word[2] : word;
    word = words.word[3] ? words.word[3] : word;
    return word >> 16 ? word >> 16 : word;
  }
};

template <>
struct RowStarts<std::uint32_t> {
  struct alignas(16) Words {
    std::uint32_t word[8];
  };
  Words words = {};

  SEGSCATTER_DEVICE int operator[](int i) const { return static_cast<int>(words.word[i]); }
  SEGSCATTER_DEVICE bool any_later() const {
    std::uint32_t any = 0;
    SEGSCATTER_UNROLL
    for (int i = 1; i < kLaneTokens; ++i) any |= words.word[i];
    return any != 0;
  }
  SEGSCATTER_DEVICE int last() const {
    std::uint32_t code = words.word[0];
    SEGSCATTER_UNROLL
    for (int i = 1; i < kLaneTokens; ++i) code = words.word[i] ? words.word[i] : code;
    return static_cast<int>(code);
  }
};

/// 32 successive document boundaries, one per lane. The last one only tells where the 31st document ends; it comes back
/// as the first of the next window, whose loads are already on their way. Positions count from the chunk's first token.
template <Label kLabel>
struct DocumentWindow {
  const WalkParams& p;
  std::int64_t chunk_begin;
  int lane;
  std::int64_t first = 0;  ///< the boundary of lane 0
  int position = 0;        ///< where the lane's document starts
  int code = kNoLabel;
  int mark = 0;                  ///< `code` if the document has tokens, else 0
  std::int64_t next_offset = 0;  ///< of the next window, as loaded, so that nothing waits for the loads yet
  std::int64_t next_label = -1;

  SEGSCATTER_DEVICE DocumentWindow(const WalkParams& params, std::int64_t begin, int warp_lane)
      : p(params), chunk_begin(begin), lane(warp_lane) {}

  SEGSCATTER_DEVICE int place(std::int64_t offset) const {
    return static_cast<int>(minimum<std::int64_t>(maximum(offset, chunk_begin - 1) - chunk_begin, kFarAway));
  }
  SEGSCATTER_DEVICE int boundary(std::int64_t d) const {
    return d <= p.segments.num_segments ? place(load_offset(p, d)) : kFarAway;
  }
  SEGSCATTER_DEVICE void fetch(std::int64_t d) {
    next_offset = chunk_begin + kFarAway;
    next_label = -1;
    if (d <= p.segments.num_segments) next_offset = load_offset(p, d);
    if (d < p.segments.num_segments) {
      next_label = kLabel == Label::kDocument ? d : load_group(p, d);
    }
  }
  SEGSCATTER_DEVICE void take() {
    const std::uint64_t labels = kLabel == Label::kDocument ? p.segments.num_segments : p.segments.num_groups;
    position = place(next_offset);
    code = static_cast<std::uint64_t>(next_label) < labels ? static_cast<int>(next_label) + kFirstLabel : kNoLabel;
    const int next = shuffle_down(position, 1);  // the last lane gets its own: "empty"
    mark = position < next ? code : 0;
    if (warp_any(position > next)) mark = 0;  // not sorted: nothing starts in this window
    fetch(first + kLanes - 1 + lane);
  }
  /// Where boundary `from` is at or before `token`: moves the window so that it holds the last such boundary, by rounds
  /// of 32 probes. It lies less than 1 << shift boundaries on.
  SEGSCATTER_DEVICE void seek(std::int64_t from, int shift, int token) {
    while (shift > 5) {
      shift = maximum(shift - 5, 5);
      const int reached = count_ones(warp_ballot(boundary(from + (static_cast<std::int64_t>(lane) << shift)) <= token));
      from += static_cast<std::int64_t>(maximum(reached - 1, 0)) << shift;
    }
    first = from;
    fetch(first + lane);
    take();
  }
  SEGSCATTER_DEVICE void step() {
    first += kLanes - 1;
    take();
  }
  SEGSCATTER_DEVICE void advance() {
    step();
    if (!warp_any(mark != 0)) {  // only empty documents, and there may be many more: search for the end of them
      seek(first + kLanes - 1, p.top_shift, shuffle(position, kLanes - 1));
    }
  }
  /// The lanes whose document starts at or before `token`.
  SEGSCATTER_DEVICE std::uint32_t reached(int token) const { return warp_ballot(position <= token); }
  /// The code that the last of these lanes has.
  SEGSCATTER_DEVICE int last_code(std::uint32_t lanes) const { return shuffle(code, 31 - leading_zeros(lanes)); }
};

constexpr std::uint32_t kAllLanes = ~0u;

/// One warp's way over its tokens.
template <class Sink>
struct Walk {
  using Code = typename Sink::Code;

  Sink& sink;
  DocumentWindow<Sink::kLabel> window;
  Code* row_codes;           ///< [kRowTokens] in shared memory, of this warp
  std::uint32_t passed = 0;  ///< lanes of the window whose document starts at or before the row
  int code = kNoLabel;       ///< where the row begins

  SEGSCATTER_DEVICE int lane() const { return window.lane; }

  SEGSCATTER_DEVICE void begin(std::int64_t from, int shift, int token) {
    window.seek(from, shift, token);
    passed = window.reached(token);
    if (passed == kAllLanes) {  // then the boundary behind the window lies past `token`
      window.step();
      passed = window.reached(token);
    }
    if (passed) code = window.last_code(passed);
    sink.begin(code);
  }

  /// Whether no document starts after the row's first token and up to `token`.
  SEGSCATTER_DEVICE bool quiet_to(int token) const { return window.reached(token) == passed; }

  /// Finds the documents that start inside (begin, end). Returns the code before the lane's own starts.
  SEGSCATTER_DEVICE int find_starts(int begin, int end, RowStarts<Code>& starts) {
    auto* own = reinterpret_cast<typename RowStarts<Code>::Words*>(row_codes) + lane();
    *own = {};
    warp_barrier();
    for (;;) {
      const int token = window.position - begin;
      if (window.mark && static_cast<unsigned>(token - 1) < kRowTokens - 1) {
        row_codes[token] = static_cast<Code>(window.mark);
      }
      if (passed != kAllLanes) break;
      window.advance();
      passed = window.reached(end);
      warp_barrier();  // garbage can name a token in two windows
    }
    warp_barrier();
    starts.words = *own;
    const int last = starts.last();
    const std::uint32_t lanes_before = warp_ballot(last != 0) & ((1u << lane()) - 1);
    const int lane_code = shuffle(last, 31 - leading_zeros(lanes_before));
    return lanes_before ? lane_code : code;
  }

  template <class Value>
  SEGSCATTER_DEVICE void add_row(const Octet<Value>& values, const LiveFlags& live, const Row& row) {
    const int end = row.begin + kRowTokens;
    const int row_code = code;
    const std::uint32_t reached = window.reached(end);
    if (reached != passed) {
      const int last_inside = reached == kAllLanes ? end : end - 1;  // a full window has to be moved on in any case
      const bool inside = window.reached(last_inside) != passed;
      passed = reached;
      RowStarts<Code> starts;
      int lane_code = row_code;
      if (inside) lane_code = find_starts(row.begin, end, starts);
      code = window.last_code(passed);
      if (inside) {
        sink.add_split(values, live, row, row_code, lane_code, starts);
        return;
      }
    }
    sink.enter(row_code);
    sink.add(values, live, row);
  }
};

/// Walks over chunk number `chunk`; `row_values` are the values of the whole row. All threads of the block call this.
/// `aligned`: 16-byte loads of values and mask, and whatever the sink does with a whole row, are allowed.
template <int kThreads, int kRowsAhead, class Value, class MaskWord, class Sink>
SEGSCATTER_DEVICE void walk_chunk(const WalkParams& p, const Value* row_values, bool aligned, std::int64_t chunk,
                                  Sink& sink) {
  constexpr int kStep = kRowsAhead * kRowTokens;
  const int warp = warp_index();
  const int lane = keep(lane_index());
  const std::int64_t chunk_begin = chunk * (kThreads / kLanes * p.warp_tokens);
  const int begin = keep(warp * p.warp_tokens);
  const int end = keep(static_cast<int>(minimum<std::int64_t>(begin + p.warp_tokens, p.num_tokens - chunk_begin)));
  const int last_vector_row = keep(aligned ? end - kRowTokens : -1);  // rows that begin up to here are loaded at once

  const bool has_mask = sizeof(MaskWord) > 1 || p.has_mask;  // no mask comes as one of bytes, which are not read
  const Value* values = row_values + (chunk_begin + begin + lane * kLaneTokens);
  const MaskWord* mask = static_cast<const MaskWord*>(p.mask) + (chunk_begin + begin + lane * kLaneTokens);
  Tokens<Value, MaskWord> ahead[kRowsAhead];  // asked for before anything else, and then a step ahead of use
  SEGSCATTER_UNROLL
  for (int j = 0; j < kRowsAhead; ++j) ahead[j].mask = {};
  bool ready = begin + kStep - kRowTokens <= last_vector_row;
  SEGSCATTER_UNROLL
  for (int j = 0; j < kRowsAhead; ++j) {
    if (ready) ahead[j].load(values + j * kRowTokens, mask + j * kRowTokens, has_mask);
  }
  sink.prepare();

  using Code = typename Sink::Code;
  Walk<Sink> walk{sink, DocumentWindow<Sink::kLabel>(p, chunk_begin, lane),
                  reinterpret_cast<Code*>(shared_memory() + kPivotBytes) + keep(warp * kRowTokens)};
  std::int64_t from = 0;
  int shift = p.top_shift;
  if (p.segments.num_segments >= kPivots) {  // else a round of the warp's own search does as much
    int* pivots = reinterpret_cast<int*>(shared_memory());
    for (int i = 0; i < kPivots / kThreads; ++i) {
      const int k = thread_index() + i * kThreads;
      pivots[k + (k >> 5)] = walk.window.boundary(static_cast<std::int64_t>(k) << p.pivot_shift);
    }
    block_barrier();
    const int coarse = maximum(count_ones(warp_ballot(pivots[lane * (kLanes + 1)] <= begin)) - 1, 0);
    const int fine = maximum(count_ones(warp_ballot(pivots[coarse * (kLanes + 1) + lane] <= begin)) - 1, 0);
    from = static_cast<std::int64_t>(coarse * kLanes + fine) << p.pivot_shift;
    shift = p.pivot_shift;
  }
  warp_barrier();  // what prepare() wrote to shared memory is seen by the warp
  if (begin >= end) return;

  walk.begin(from, shift, begin);
  for (int row = begin; row < end;) {
    const int next = row + kStep;
    const bool more = next + kStep - kRowTokens <= last_vector_row;
    if (ready && walk.quiet_to(next)) {  // all of the step lies in one document
      sink.enter(walk.code);
      SEGSCATTER_UNROLL
      for (int j = 0; j < kRowsAhead; ++j) {
        sink.add(ahead[j].values, ahead[j].live(p.test), Row{row + j * kRowTokens, kLaneTokens, true});
        if (more) ahead[j].load(values + kStep + j * kRowTokens, mask + kStep + j * kRowTokens, has_mask);
      }
      row = next;
      values += kStep;
      mask += kStep;
    } else {  // row by row: the step's rows are loaded again, from the cache by now, so that no code is unrolled here
      SEGSCATTER_UNROLL
      for (int j = 0; j < kRowsAhead; ++j) {
        if (more) ahead[j].load(values + kStep + j * kRowTokens, mask + kStep + j * kRowTokens, has_mask);
      }
      for (const int stop = minimum(next, end); row < stop; row += kRowTokens) {
        Tokens<Value, MaskWord> now;
        now.mask = {};
        LiveFlags live;
        const int lane_tokens = end - row - lane * kLaneTokens;
        const bool vector = row <= last_vector_row;
        if (vector) {
          now.load(values, mask, has_mask);
          live = now.live(p.test);
        } else {
          now.values.load(values, p.has_values ? lane_tokens : 0);
          if (has_mask) now.mask.load(mask, lane_tokens);
          live = now.live(p.test);
          live.limit(lane_tokens);
        }
        walk.add_row(now.values, live, Row{row, lane_tokens, vector});
        values += kRowTokens;
        mask += kRowTokens;
      }
    }
    ready = more;
  }
  sink.finish();
}

}  // namespace segscatter::core::cuda
