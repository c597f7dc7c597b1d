// SPDX-License-Identifier: Apache-2.0
// Reduction on the CPU: chunks in parallel, then their results in chunk order.
//
// Two ways. By table: the groups that occur in a chunk have an entry each; chunks hand their entries to the combine
// step. By document, for identity groups and where a table of groups would be large: every document gets its own sum,
// written by the one chunk that holds it whole, or put together from the pieces that chunks found; documents are then
// added to their groups in order.
#include <cstring>

#include "chunks.h"
#include "documents.h"
#include "kernels.h"
#include "segment_sums.h"

namespace segscatter::core {
namespace {

using namespace detail;

/// A table entry is 136 bytes for every worker and up to 8 * (K + 2) bytes for every chunk. Kernels hold entries in 16
/// bits.
constexpr std::int64_t kMaxTableEntries = 4096;

/// To find a group's entry takes 4 bytes for every worker and group.
constexpr std::int64_t kMaxTableGroups = 65536;

/// Hands out 64-byte aligned arrays from one block of memory, or only adds up their sizes where there is none.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(static_cast<unsigned char*>(memory)) {}
  template <class T>
  T* take(std::int64_t count) {
    T* result = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return result;
  }
  std::size_t used() const { return used_; }

 private:
  unsigned char* memory_;
  std::size_t used_ = 0;
};

struct Sizes {
  Chunks chunks;
  int workers;
  std::int64_t table_entries;
  bool by_document;

  Sizes(const ReduceArgs& args, const Executor& executor)
      : chunks(args.num_tokens),
        workers(workers_for(executor, chunks.count)),
        table_entries(std::min(args.segments.num_groups, args.segments.num_segments)),
        by_document(args.segments.group_ids.data == nullptr || table_entries > kMaxTableEntries ||
                    args.segments.num_groups > kMaxTableGroups) {}
};

/// Totals of the groups in float64, where the result is not float64 itself or is added to.
struct Totals {
  double* sums;          // [num_rows, num_groups]
  std::int64_t* counts;  // [num_groups]

  Totals(Arena& arena, const ReduceArgs& args)
      : sums(arena.take<double>(args.num_rows * args.segments.num_groups)),
        counts(arena.take<std::int64_t>(args.segments.num_groups)) {}

  void clear(const ReduceArgs& args) const {
    std::fill_n(sums, args.num_rows * args.segments.num_groups, 0.0);
    std::fill_n(counts, args.segments.num_groups, std::int64_t{0});
  }
  void write(const ReduceArgs& args) const {
    const SegmentSums out{args.sums, args.sum_type, args.counts, args.accumulate};
    for (std::int64_t i = 0; i < args.num_rows * args.segments.num_groups; ++i) add_sum(out, i, sums[i]);
    for (std::int64_t g = 0; g < args.segments.num_groups; ++g) add_count(out, g, counts[g]);
  }
};

/// Every worker's bits of the chunk that it works on.
LiveTokens* take_live_tokens(Arena& arena, const Sizes& sizes) {
  LiveTokens* live = arena.take<LiveTokens>(sizes.workers);
  for (int i = 0; i < sizes.workers; ++i) {
    std::uint8_t* bytes = arena.take<std::uint8_t>(LiveTokens::size(sizes.chunks.size));
    if (live) live[i] = {bytes};
  }
  return live;
}

struct TableWorkspace {
  Totals totals;
  LiveTokens* live;       // [workers]
  ChunkGroups* groups;    // [chunks]
  GroupScratch* scratch;  // [workers]

  TableWorkspace(Arena& arena, const ReduceArgs& args, const Sizes& sizes)
      : totals(arena, args), live(take_live_tokens(arena, sizes)) {
    groups = arena.take<ChunkGroups>(sizes.chunks.count);
    scratch = arena.take<GroupScratch>(sizes.workers);
    const std::int64_t capacity = sizes.table_entries;
    for (std::int64_t i = 0; i < sizes.chunks.count; ++i) {
      const ChunkGroups chunk{arena.take<std::int64_t>(capacity), arena.take<std::int64_t>(capacity),
                              arena.take<double>(args.num_rows * capacity), capacity};
      if (groups) groups[i] = chunk;
    }
    for (int i = 0; i < sizes.workers; ++i) {
      const GroupScratch worker{arena.take<double>((capacity + 1) * kLanes), arena.take<std::int64_t>(capacity + 1),
                                arena.take<std::int32_t>(args.segments.num_groups)};
      if (scratch) scratch[i] = worker;
    }
  }
};

void reduce_by_table(const ReduceArgs& args, const Sizes& sizes, TableWorkspace workspace, const Kernels& kernels,
                     const Executor& executor) {
  for (int i = 0; i < sizes.workers; ++i) {
    std::fill_n(workspace.scratch[i].entries, args.segments.num_groups, -1);
  }
  for_each_chunk(executor, sizes.workers, sizes.chunks.count, [&](int worker, std::int64_t i) {
    const LiveTokens& live = workspace.live[worker];
    kernels.find_live(args.mask, sizes.chunks[i], live);
    kernels.reduce_groups(args, sizes.chunks[i], live, workspace.scratch[worker], workspace.groups[i]);
  });
  workspace.totals.clear(args);
  for (std::int64_t i = 0; i < sizes.chunks.count; ++i) {
    const ChunkGroups& chunk = workspace.groups[i];
    for (std::int32_t entry = 0; entry < chunk.size; ++entry) {
      const std::int64_t group = chunk.groups[entry];
      workspace.totals.counts[group] += chunk.counts[entry];
      for (std::int64_t row = 0; row < args.num_rows; ++row) {
        workspace.totals.sums[row * args.segments.num_groups + group] += chunk.sums[row * chunk.capacity + entry];
      }
    }
  }
  workspace.totals.write(args);
}

void clear(const SegmentSums& out, std::int64_t num_rows, std::int64_t size) {
  if (size == 0) return;
  std::memset(out.sums, 0, static_cast<std::size_t>(num_rows * size) * size_of(out.sum_type));
  std::memset(out.counts, 0, static_cast<std::size_t>(size) * sizeof(std::int64_t));
}

/// Adds up successive pieces of each document that spans chunks.
void combine_pieces(const ChunkPieces* pieces, std::int64_t num_chunks, std::int64_t num_rows,
                    std::int64_t num_segments, const SegmentSums& out) {
  for (std::int64_t row = 0; row < num_rows; ++row) {
    std::int64_t segment = -1, count = 0;
    double sum = 0.0;
    const auto finish = [&] {
      if (segment < 0) return;
      add_sum(out, row * num_segments + segment, sum);
      if (row == 0) add_count(out, segment, count);
    };
    for (std::int64_t i = 0; i < num_chunks; ++i) {
      for (std::int32_t k = 0; k < pieces[i].size; ++k) {
        if (pieces[i].segments[k] != segment) {
          finish();
          segment = pieces[i].segments[k];
          sum = 0.0;
          count = 0;
        }
        sum += pieces[i].sums[row * ChunkPieces::kCapacity + k];
        count += pieces[i].counts[k];
      }
    }
    finish();
  }
}

struct DocumentWorkspace {
  LiveTokens* live;        // [workers]
  ChunkPieces* pieces;     // [chunks]
  double* sums = nullptr;  // [num_rows, num_segments], where documents are to be added to groups
  std::int64_t* counts = nullptr;
  double* totals = nullptr;

  DocumentWorkspace(Arena& arena, const ReduceArgs& args, const Sizes& sizes) : live(take_live_tokens(arena, sizes)) {
    pieces = arena.take<ChunkPieces>(sizes.chunks.count);
    for (std::int64_t i = 0; i < sizes.chunks.count; ++i) {
      double* piece_sums = arena.take<double>(args.num_rows * ChunkPieces::kCapacity);
      if (pieces) pieces[i].sums = piece_sums;
    }
    if (args.segments.group_ids.data == nullptr) return;
    sums = arena.take<double>(args.num_rows * args.segments.num_segments);
    counts = arena.take<std::int64_t>(args.segments.num_segments);
    totals = arena.take<double>(args.num_rows * args.segments.num_groups);
  }
};

/// Adds documents to their groups in order; every worker owns a range of groups.
void scatter_documents(const ReduceArgs& args, const DocumentWorkspace& workspace, int workers,
                       const Executor& executor) {
  const std::int64_t num_segments = args.segments.num_segments, num_groups = args.segments.num_groups;
  const SegmentSums out{args.sums, args.sum_type, args.counts, args.accumulate};
  for_each_chunk(executor, workers, workers, [&](int, std::int64_t part) {
    const std::int64_t begin = num_groups * part / workers, end = num_groups * (part + 1) / workers;
    if (!args.accumulate) std::fill(args.counts + begin, args.counts + end, std::int64_t{0});
    for (std::int64_t row = 0; row < args.num_rows; ++row) {
      double* totals = workspace.totals + row * num_groups;
      std::fill(totals + begin, totals + end, 0.0);
      for (std::int64_t d = 0; d < num_segments; ++d) {
        const std::int64_t group = group_of(args.segments, d);
        if (group < begin || group >= end) continue;
        totals[group] += workspace.sums[row * num_segments + d];
        if (row == 0) args.counts[group] += workspace.counts[d];
      }
      for (std::int64_t group = begin; group < end; ++group) add_sum(out, row * num_groups + group, totals[group]);
    }
  });
}

void reduce_by_document(const ReduceArgs& args, const Sizes& sizes, const DocumentWorkspace& workspace,
                        const Kernels& kernels, const Executor& executor) {
  const bool identity = args.segments.group_ids.data == nullptr;
  const std::int64_t num_segments = args.segments.num_segments;
  const SegmentSums out = identity ? SegmentSums{args.sums, args.sum_type, args.counts, args.accumulate}
                                   : SegmentSums{workspace.sums, FloatType::kFloat64, workspace.counts, false};
  if (!out.accumulate) clear(out, args.num_rows, identity ? args.segments.num_groups : num_segments);
  for_each_chunk(executor, sizes.workers, sizes.chunks.count, [&](int worker, std::int64_t i) {
    const LiveTokens& live = workspace.live[worker];
    kernels.find_live(args.mask, sizes.chunks[i], live);
    kernels.reduce_segments(args, sizes.chunks[i], live, out, workspace.pieces[i]);
  });
  combine_pieces(workspace.pieces, sizes.chunks.count, args.num_rows, num_segments, out);
  if (!identity) scatter_documents(args, workspace, sizes.workers, executor);
}

/// What is left to do without value rows. Rare, so no work for several threads.
void count(const ReduceArgs& args, const Sizes& sizes, const LiveTokens& live, FindLive find_live) {
  if (!args.accumulate) std::fill_n(args.counts, args.segments.num_groups, std::int64_t{0});
  for (std::int64_t i = 0; i < sizes.chunks.count; ++i) {
    find_live(args.mask, sizes.chunks[i], live);
    DocumentBlock documents(args.segments, sizes.chunks[i]);
    while (documents.advance()) {
      for (int d = 0; d < documents.count(); ++d) {
        const std::int64_t group = documents.group(d);
        if (group < 0) continue;
        for (std::int32_t t = documents.begin(d); t < documents.end(d); ++t) {
          args.counts[group] += live.bytes[t / 8] >> t % 8 & 1;
        }
      }
    }
  }
}

Status invalid(const char* message) {
  return {Status::Code::kInvalidArgument, message};
}

Status check(const ReduceArgs& args) {
  const Segments& segments = args.segments;
  if (args.num_rows < 0 || args.num_tokens < 0 || segments.num_segments < 0 || segments.num_groups < 0) {
    return invalid("reduce_cpu: sizes must not be negative");
  }
  if (args.sum_type != FloatType::kFloat32 && args.sum_type != FloatType::kFloat64) {
    return invalid("reduce_cpu: sum_type must be kFloat32 or kFloat64");
  }
  if (segments.group_ids.data == nullptr && segments.num_segments != 0 &&
      segments.num_groups != segments.num_segments) {
    return invalid("reduce_cpu: without group_ids num_groups must equal num_segments");
  }
  return {};
}

}  // namespace

std::size_t reduce_cpu_workspace(const ReduceArgs& args, const Executor& executor) {
  const Sizes sizes(args, executor);
  Arena arena(nullptr);
  if (args.num_rows == 0) {
    take_live_tokens(arena, sizes);
  } else if (sizes.by_document) {
    DocumentWorkspace(arena, args, sizes);
  } else {
    TableWorkspace(arena, args, sizes);
  }
  return arena.used();
}

Status reduce_cpu(const ReduceArgs& args, void* workspace, std::size_t workspace_bytes, const Executor& executor,
                  CpuCapability capability) {
  if (const Status status = check(args); !status.ok()) return status;
  if (workspace_bytes < reduce_cpu_workspace(args, executor)) {
    return {Status::Code::kWorkspaceTooSmall, "reduce_cpu: workspace is smaller than reduce_cpu_workspace() says"};
  }
  ReduceArgs simplified = args;
  simplified.mask = simplify(args.mask);
  const Kernels kernels = find_kernels(args.value_type, simplified.mask.type, capability);
  if (kernels.reduce_groups == nullptr) {
    return {Status::Code::kUnsupportedDevice, "reduce_cpu: this build has no kernels for that instruction set"};
  }
  const Sizes sizes(args, executor);
  Arena arena(workspace);
  if (args.num_rows == 0) {
    count(simplified, sizes, *take_live_tokens(arena, sizes), kernels.find_live);
  } else if (sizes.by_document) {
    reduce_by_document(simplified, sizes, DocumentWorkspace(arena, args, sizes), kernels, executor);
  } else {
    reduce_by_table(simplified, sizes, TableWorkspace(arena, args, sizes), kernels, executor);
  }
  return {};
}

Status reduce_cpu(const ReduceArgs& args, void* workspace, std::size_t workspace_bytes, const Executor& executor) {
  return reduce_cpu(args, workspace, workspace_bytes, executor, cpu_capability());
}

}  // namespace segscatter::core
