// SPDX-License-Identifier: Apache-2.0
/// Runs CUDA kernels on the host, one fiber per CUDA thread, to test their logic and their synchronisation.
///
/// What it checks, each with abort() and a message that names launch, block and thread:
///   * barriers of a block and of a cluster: all threads must come, to the same kind of barrier; arrive and wait must
///     alternate; no thread may have left the block;
///   * collectives of a warp: all 32 lanes must come, to the same operation;
///   * deadlock (no thread can go on) and livelock (a bound on the number of switches);
///   * writes beyond the dynamic shared memory; use of a block's memory by others before it began or after it ended.
/// What it provokes: threads, warps, blocks and dependent launches are interleaved by a seeded random schedule, several
/// blocks at a time; shared memory starts with random bytes and is overwritten when its block ends.
/// What ThreadSanitizer adds: a fiber is a thread for it. Barriers and __syncwarp order memory, shuffles and votes do
/// not, nothing orders two blocks of a launch; so a missing barrier is a data race, wherever the schedule went.
/// What it cannot see: weak memory between blocks of a running launch, alignment of vector accesses (UBSan sees that),
/// anything about time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace segscatter::simt {

/// One kernel launch. Grids and blocks are one-dimensional.
struct Launch {
  std::string name;
  std::function<void()> kernel;
  unsigned blocks = 1;
  unsigned threads = 32;         ///< of a block; a multiple of 32
  unsigned cluster_blocks = 1;   ///< divides `blocks`
  std::size_t shared_bytes = 0;  ///< dynamic shared memory of a block
  bool programmatic = false;     ///< may begin when every block of the launch before has triggered or ended
  unsigned first_block = 0;      ///< the blocks before it are left out, so that a test can look at the end of huge data
};

/// Runs launches in stream order. The same seed gives the same schedule; seed 0 runs threads and blocks in order, one
/// block (or cluster) at a time.
void run(const std::vector<Launch>& stream, std::uint64_t seed);

/// Launches that run() has finished so far in this process.
std::uint64_t launches_run();

// ---- what the running thread may ask and do ----

struct ThreadIndices {
  unsigned thread, block_threads, block, grid_blocks;
};
/// Of the running thread.
extern const ThreadIndices* this_thread;

void* shared_memory();
/// Where `address`, which lies in this block's dynamic shared memory, lies in that of block `rank` of the cluster.
void* map_shared_rank(void* address, unsigned rank);

/// Kinds of block barrier, told apart as hardware would not: meeting at different ones is a mistake.
enum class BlockBarrier { kSync, kAny };
/// Waits for all threads of the block. Returns whether any came with `condition`.
bool block_barrier(BlockBarrier kind, bool condition);

void cluster_arrive();
void cluster_wait();
unsigned cluster_rank();
unsigned cluster_blocks();

enum class WarpOp { kBarrier, kShuffle, kShuffleDown, kShuffleXor, kBallot, kAny, kMatch };
/// A collective of the warp's 32 lanes. Shuffles return the operand of `source_lane`, kMatch the lanes with an equal
/// operand, the votes the lanes whose operand is not zero.
std::uint64_t warp_collective(WarpOp op, std::uint64_t operand, int source_lane);

/// Programmatic dependent launch: lets the next launch begin; waits for the end of the one before.
void allow_next_launch();
void wait_for_previous_launch();

/// Stops the program, naming the running thread.
[[noreturn]] void fail(const std::string& message);

}  // namespace segscatter::simt
