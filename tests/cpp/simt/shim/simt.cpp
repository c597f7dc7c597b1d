// SPDX-License-Identifier: Apache-2.0
// The scheduler of the SIMT shim. Compiled without -fsanitize=thread, and all types are local to this file, so that
// ThreadSanitizer sees only what kernels access.
#include "simt.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <utility>

#include "fiber.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) (static_cast<void>(address), static_cast<void>(bytes))
#endif

namespace segscatter::simt {

const ThreadIndices* this_thread = nullptr;

namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxCluster = 16;
constexpr std::size_t kMaxSharedBytes = 227 * 1024;
constexpr std::uint64_t kMaxSwitches = std::uint64_t{1} << 31;  // of one run()
constexpr unsigned kMaxResidentThreads = 4096;

// splitmix64, much faster than the standard engines.
class Random {
 public:
  using result_type = std::uint64_t;
  explicit Random(std::uint64_t seed) : state_(seed) {}
  static constexpr result_type min() { return 0; }
  static constexpr result_type max() { return ~result_type{0}; }
  result_type operator()() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }
  /// In [0, bound); `bound` is at most 2^32.
  std::uint64_t below(std::uint64_t bound) { return ((*this)() >> 32) * bound >> 32; }

 private:
  std::uint64_t state_;
};

struct Thread;
struct Block;
struct Cluster;
struct Grid;

// ThreadSanitizer's view of a barrier. Two tags take turns: a thread that is fast enough to come to the next round must
// not be seen by one that is still leaving this round.
struct Tags {
  char tag[2];
  char* of(unsigned round) { return &tag[round & 1]; }
};

struct Warp {
  Thread* lanes[kWarp];
  unsigned exited = 0;
  // The collective under way, if anyone has arrived.
  WarpOp op{};
  unsigned arrived = 0;
  unsigned round = 0;
  Tags tags;
  std::uint64_t operands[kWarp];
  int sources[kWarp];
};

// Dynamic shared memory between two guard zones. The address is a multiple of 16 and no more.
class SharedMemory {
 public:
  SharedMemory(std::size_t bytes, Random& random)
      : bytes_(bytes), storage_(bytes + 2 * kGuard + kAlignment), random_(random) {
    auto address = reinterpret_cast<std::uintptr_t>(storage_.data()) + kGuard;
    address = (address + kAlignment - 1) / kAlignment * kAlignment;
    if (address + 16 + bytes + kGuard <= reinterpret_cast<std::uintptr_t>(storage_.data() + storage_.size())) {
      address += 16;
    }
    data_ = reinterpret_cast<unsigned char*>(address);
    std::fill(storage_.begin(), storage_.end(), kGuardByte);
    ASAN_POISON_MEMORY_REGION(storage_.data(), storage_.size());
  }
  ~SharedMemory() { ASAN_UNPOISON_MEMORY_REGION(storage_.data(), storage_.size()); }

  unsigned char* data() { return data_; }
  bool holds(const void* address) const { return address >= data_ && address <= data_ + bytes_; }

  // What the block finds there is random, whoever wrote there before.
  void begin() {
    ASAN_UNPOISON_MEMORY_REGION(data_, bytes_);
    scramble();
  }
  // Returns false if something was written beyond the end (or before the beginning).
  bool end() {
    scramble();
    ASAN_UNPOISON_MEMORY_REGION(storage_.data(), storage_.size());
    bool intact = true;
    for (const unsigned char* byte = storage_.data(); byte < data_; ++byte) intact &= *byte == kGuardByte;
    for (const unsigned char* byte = data_ + bytes_; byte < storage_.data() + storage_.size(); ++byte) {
      intact &= *byte == kGuardByte;
    }
    ASAN_POISON_MEMORY_REGION(storage_.data(), storage_.size());
    return intact;
  }

 private:
  void scramble() {
    for (std::size_t i = 0; i < bytes_; i += sizeof(std::uint64_t)) {
      const std::uint64_t bits = random_();
      std::memcpy(data_ + i, &bits, std::min(sizeof(bits), bytes_ - i));
    }
  }

  static constexpr std::size_t kGuard = 64, kAlignment = 32;
  static constexpr unsigned char kGuardByte = 0xa5;
  std::size_t bytes_;
  std::vector<unsigned char> storage_;
  Random& random_;
  unsigned char* data_;
};

struct Block {
  Grid* grid;
  Cluster* cluster;
  unsigned rank;
  std::unique_ptr<SharedMemory> shared;
  std::vector<Warp> warps;
  unsigned exited = 0;
  bool began = false;
  bool triggered = false;

  BlockBarrier kind{};
  unsigned arrived = 0;
  unsigned round = 0;
  bool any = false;
  bool result = false;
  Tags tags;
  std::vector<Thread*> waiting;
};

struct Cluster {
  Grid* grid;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Thread>> threads;
  unsigned ended_blocks = 0;

  unsigned arrived = 0;
  unsigned round = 0;
  Tags tags;
  std::vector<Thread*> waiting;
};

struct Thread {
  ThreadIndices indices;
  Block* block;
  Warp* warp;
  unsigned lane;
  std::unique_ptr<Fiber> fiber;
  const char* waiting_for = nullptr;
  std::uint64_t result = 0;  // of the last warp collective
  bool cluster_arrived = false;
  unsigned cluster_round = 0;
};

struct Grid {
  const Launch* launch;
  std::size_t index;
  std::vector<unsigned> cluster_order;
  std::size_t admitted = 0;  // clusters
  unsigned ended_clusters = 0;
  unsigned ready_blocks = 0;  // that triggered or ended
  char begin_tag = 0;
  char end_tag = 0;
  std::vector<Thread*> dependents;  // that wait for the end of this launch

  unsigned blocks() const { return launch->blocks - launch->first_block; }
  unsigned clusters() const { return blocks() / launch->cluster_blocks; }
  bool ended() const { return ended_clusters == clusters(); }
};

const char* name_of(WarpOp op) {
  static const char* const kNames[] = {"warp_barrier", "shuffle",  "shuffle_down", "shuffle_xor",
                                       "warp_ballot",  "warp_any", "warp_match"};
  return kNames[static_cast<int>(op)];
}
const char* name_of(BlockBarrier kind) {
  return kind == BlockBarrier::kSync ? "block_barrier" : "block_any";
}

class Scheduler {
 public:
  Scheduler(const std::vector<Launch>& stream, std::uint64_t seed);
  ~Scheduler();
  void run();

  Thread& current() { return *current_; }
  Grid& grid(std::size_t index) { return grids_[index]; }
  [[noreturn]] void fail(const std::string& message) const;

  // A thread that waits is woken by wake(), and by nothing else.
  void wait(const char* reason);
  void wake(Thread* thread) { ready_.push_back(thread); }
  void wake_all(std::vector<Thread*>& threads);
  // Whoever completes a barrier may go on at once, or not.
  void perhaps_yield();
  void trigger(Block& block);

 private:
  // In what order threads that can run do run. All but the first are adversaries of a forgotten barrier.
  enum class Policy { kInOrder, kRandom, kDepthFirst, kStarveWarp };

  static void check(const Launch& launch);
  static void thread_main(void* scheduler);
  void admit();
  Grid* next_grid();
  void admit_cluster(Grid& grid);
  Thread* pick();
  void retire(Thread& thread);
  [[noreturn]] void report_deadlock() const;

  Random random_;
  Policy policy_;
  std::uint64_t max_resident_clusters_;
  std::deque<Grid> grids_;
  std::vector<std::unique_ptr<Cluster>> resident_;
  unsigned resident_threads_ = 0;
  std::deque<Thread*> ready_;
  Thread* current_ = nullptr;
  const Warp* starved_ = nullptr;
  std::uint64_t switches_ = 0;
};

Scheduler* scheduler = nullptr;
std::uint64_t launches = 0;

// Fibers are costly to create under ThreadSanitizer, hence a pool. It is left to the operating system at exit.
std::vector<std::unique_ptr<Fiber>>& fiber_pool() {
  static auto* pool = new std::vector<std::unique_ptr<Fiber>>;
  return *pool;
}

Scheduler::Scheduler(const std::vector<Launch>& stream, std::uint64_t seed)
    : random_(seed), policy_(seed == 0 ? Policy::kInOrder : static_cast<Policy>(1 + seed % 3)) {
  max_resident_clusters_ = seed == 0 ? 1 : 1 + random_.below(4);
  for (const Launch& launch : stream) {
    check(launch);
    Grid grid;
    grid.launch = &launch;
    grid.index = grids_.size();
    grid.cluster_order.resize(grid.clusters());
    std::iota(grid.cluster_order.begin(), grid.cluster_order.end(), launch.first_block / launch.cluster_blocks);
    if (seed != 0) std::shuffle(grid.cluster_order.begin(), grid.cluster_order.end(), random_);
    grids_.push_back(std::move(grid));
  }
}

Scheduler::~Scheduler() = default;

// What the CUDA runtime would refuse.
void Scheduler::check(const Launch& launch) {
  const auto refuse = [&launch](const char* why) {
    std::fprintf(stderr, "SIMT: launch of %s refused: %s\n", launch.name.c_str(), why);
    std::abort();
  };
  if (launch.blocks == 0 || launch.blocks > 0x7fffffffu) refuse("a grid has 1 to 2^31 - 1 blocks");
  if (launch.threads == 0 || launch.threads > kMaxThreads) refuse("a block has 1 to 1024 threads");
  if (launch.threads % kWarp != 0) refuse("the shim wants whole warps");
  if (launch.cluster_blocks == 0 || launch.cluster_blocks > kMaxCluster) refuse("a cluster has 1 to 16 blocks");
  if (launch.blocks % launch.cluster_blocks != 0) refuse("the cluster size does not divide the grid");
  if (launch.first_block >= launch.blocks || launch.first_block % launch.cluster_blocks != 0) {
    refuse("first_block begins no cluster of the grid");
  }
  if (launch.shared_bytes > kMaxSharedBytes) refuse("a block has at most 227 KiB of shared memory");
}

void Scheduler::fail(const std::string& message) const {
  std::fprintf(stderr, "SIMT: %s (kernel %s, block %u, thread %u)\n", message.c_str(),
               current_->block->grid->launch->name.c_str(), current_->indices.block, current_->indices.thread);
  std::abort();
}

void Scheduler::run() {
  if (grids_.empty()) return;
  for (Grid& grid : grids_) tsan_release(&grid.begin_tag);
  for (;;) {
    admit();
    if (ready_.empty()) {
      if (resident_.empty()) break;
      report_deadlock();
    }
    if (++switches_ > kMaxSwitches) {
      std::fprintf(stderr, "SIMT: livelock: a run takes more than %llu switches\n",
                   static_cast<unsigned long long>(kMaxSwitches));
      std::abort();
    }
    current_ = pick();
    current_->waiting_for = nullptr;
    this_thread = &current_->indices;
    if (!current_->block->began) {
      current_->block->began = true;
      current_->block->shared->begin();
    }
    current_->fiber->resume();
    this_thread = nullptr;
    if (current_->fiber->finished()) retire(*current_);
  }
  for (Grid& grid : grids_) tsan_acquire(&grid.end_tag);
  launches += grids_.size();
}

// Blocks come in as there is room, at random moments unless the order is fixed.
void Scheduler::admit() {
  while (resident_.size() < max_resident_clusters_) {
    Grid* grid = next_grid();
    if (grid == nullptr) return;
    const unsigned threads = grid->launch->threads * grid->launch->cluster_blocks;
    if (!resident_.empty() && resident_threads_ + threads > kMaxResidentThreads) return;
    if (!resident_.empty() && !ready_.empty() && random_.below(8) != 0) return;
    admit_cluster(*grid);
  }
}

Grid* Scheduler::next_grid() {
  for (Grid& grid : grids_) {
    if (grid.admitted != grid.cluster_order.size()) return &grid;
    if (grid.ended()) continue;
    // The next launch overlaps with this one only if it may and every block of this one lets it.
    const std::size_t next = grid.index + 1;
    if (next == grids_.size() || !grids_[next].launch->programmatic || grid.ready_blocks != grid.blocks())
      return nullptr;
    return grids_[next].admitted != grids_[next].cluster_order.size() ? &grids_[next] : nullptr;
  }
  return nullptr;
}

void Scheduler::admit_cluster(Grid& grid) {
  const Launch& launch = *grid.launch;
  auto cluster = std::make_unique<Cluster>();
  cluster->grid = &grid;
  const unsigned first = grid.cluster_order[grid.admitted++] * launch.cluster_blocks;
  for (unsigned rank = 0; rank < launch.cluster_blocks; ++rank) {
    auto block = std::make_unique<Block>();
    block->grid = &grid;
    block->cluster = cluster.get();
    block->rank = rank;
    block->shared = std::make_unique<SharedMemory>(launch.shared_bytes, random_);
    block->warps.resize(launch.threads / kWarp);
    for (unsigned t = 0; t < launch.threads; ++t) {
      auto thread = std::make_unique<Thread>();
      thread->indices = {t, launch.threads, first + rank, launch.blocks};
      thread->block = block.get();
      thread->warp = &block->warps[t / kWarp];
      thread->lane = t % kWarp;
      thread->warp->lanes[thread->lane] = thread.get();
      // A random one: for ThreadSanitizer, threads that use one fiber after another are one thread.
      auto& pool = fiber_pool();
      if (pool.empty()) pool.push_back(std::make_unique<Fiber>());
      std::swap(pool[random_.below(pool.size())], pool.back());
      thread->fiber = std::move(pool.back());
      pool.pop_back();
      thread->fiber->start(&Scheduler::thread_main, this);
      ready_.push_back(thread.get());
      cluster->threads.push_back(std::move(thread));
    }
    cluster->blocks.push_back(std::move(block));
  }
  resident_threads_ += launch.threads * launch.cluster_blocks;
  resident_.push_back(std::move(cluster));
}

void Scheduler::thread_main(void* self) {
  auto* me = static_cast<Scheduler*>(self);
  Grid& grid = *me->current_->block->grid;
  tsan_acquire(&grid.begin_tag);
  // Launches of a stream are ordered, except that a programmatic one sees the one before only once it has waited.
  for (std::size_t i = 0; i < grid.index; ++i) {
    if (i + 1 == grid.index && grid.launch->programmatic) continue;
    tsan_acquire(&me->grids_[i].end_tag);
  }
  grid.launch->kernel();
  tsan_release(&grid.end_tag);
}

Thread* Scheduler::pick() {
  std::size_t choice = 0;
  switch (policy_) {
    case Policy::kInOrder:
      break;
    case Policy::kRandom:
      choice = random_.below(ready_.size());
      break;
    case Policy::kDepthFirst:
      choice = random_.below(64) == 0 ? random_.below(ready_.size()) : ready_.size() - 1;
      break;
    case Policy::kStarveWarp:
      if (starved_ == nullptr || random_.below(256) == 0) starved_ = ready_[random_.below(ready_.size())]->warp;
      for (int attempt = 0; attempt < 8; ++attempt) {
        choice = random_.below(ready_.size());
        if (ready_[choice]->warp != starved_) break;
      }
      break;
  }
  Thread* thread = ready_[choice];
  if (choice == 0) {
    ready_.pop_front();
  } else {
    ready_[choice] = ready_.back();
    ready_.pop_back();
  }
  return thread;
}

void Scheduler::retire(Thread& thread) {
  Block& block = *thread.block;
  Warp& warp = *thread.warp;
  if (thread.cluster_arrived) fail("a thread exited between cluster arrive and wait");
  if (block.arrived != 0) fail(std::string("a thread exited while others wait at ") + name_of(block.kind));
  if (warp.arrived != 0) fail(std::string("a lane exited while others wait at ") + name_of(warp.op));
  warp.exited |= 1u << thread.lane;
  fiber_pool().push_back(std::move(thread.fiber));
  if (++block.exited != block.grid->launch->threads) return;

  if (!block.shared->end()) fail("something was written beyond the block's dynamic shared memory");
  trigger(block);
  Cluster& cluster = *block.cluster;
  if (++cluster.ended_blocks != cluster.blocks.size()) return;
  Grid& grid = *cluster.grid;
  resident_threads_ -= static_cast<unsigned>(cluster.threads.size());
  starved_ = nullptr;
  resident_.erase(std::find_if(resident_.begin(), resident_.end(),
                               [&cluster](const auto& resident) { return resident.get() == &cluster; }));
  ++grid.ended_clusters;
  if (grid.ended()) wake_all(grid.dependents);
}

void Scheduler::report_deadlock() const {
  std::map<std::string, unsigned> reasons;
  for (const auto& cluster : resident_) {
    for (const auto& thread : cluster->threads) {
      if (thread->fiber == nullptr) continue;
      ++reasons[cluster->grid->launch->name + ", block " + std::to_string(thread->indices.block) + ", warp " +
                std::to_string(thread->indices.thread / kWarp) + ": " +
                (thread->waiting_for != nullptr ? thread->waiting_for : "?")];
    }
  }
  std::fprintf(stderr, "SIMT: deadlock: every thread waits\n");
  for (const auto& [reason, threads] : reasons) std::fprintf(stderr, "  %4u threads of %s\n", threads, reason.c_str());
  std::abort();
}

void Scheduler::wait(const char* reason) {
  current_->waiting_for = reason;
  Fiber::suspend();
}

void Scheduler::wake_all(std::vector<Thread*>& threads) {
  for (Thread* thread : threads) wake(thread);
  threads.clear();
}

void Scheduler::perhaps_yield() {
  if (policy_ == Policy::kInOrder || random_.below(2) == 0) return;
  wake(current_);
  wait("its turn");
}

void Scheduler::trigger(Block& block) {
  if (block.triggered) return;
  block.triggered = true;
  ++block.grid->ready_blocks;
}

}  // namespace

void run(const std::vector<Launch>& stream, std::uint64_t seed) {
  const TsanIgnore ignore;
  Scheduler instance(stream, seed);
  scheduler = &instance;
  instance.run();
  scheduler = nullptr;
}

std::uint64_t launches_run() {
  return launches;
}

void fail(const std::string& message) {
  scheduler->fail(message);
}

void* shared_memory() {
  return scheduler->current().block->shared->data();
}

void* map_shared_rank(void* address, unsigned rank) {
  Block& block = *scheduler->current().block;
  if (!block.shared->holds(address)) scheduler->fail("cluster_shared of an address outside dynamic shared memory");
  if (rank >= block.cluster->blocks.size()) scheduler->fail("cluster_shared of a rank outside the cluster");
  return block.cluster->blocks[rank]->shared->data() + (static_cast<unsigned char*>(address) - block.shared->data());
}

bool block_barrier(BlockBarrier kind, bool condition) {
  const TsanIgnore ignore;
  Block& block = *scheduler->current().block;
  if (block.exited != 0) scheduler->fail(std::string(name_of(kind)) + " after a thread of the block exited");
  if (block.arrived != 0 && block.kind != kind) {
    scheduler->fail(std::string("divergent block barrier: ") + name_of(kind) + " where others wait at " +
                    name_of(block.kind));
  }
  block.kind = kind;
  block.any |= condition;
  char* tag = block.tags.of(block.round);
  tsan_release(tag);
  if (++block.arrived == block.grid->launch->threads) {
    block.result = std::exchange(block.any, false);
    block.arrived = 0;
    ++block.round;
    scheduler->wake_all(block.waiting);
    scheduler->perhaps_yield();
  } else {
    block.waiting.push_back(&scheduler->current());
    scheduler->wait(name_of(kind));
  }
  tsan_acquire(tag);
  return block.result;  // the next round cannot end before this thread has come to it
}

void cluster_arrive() {
  const TsanIgnore ignore;
  Thread& thread = scheduler->current();
  Cluster& cluster = *thread.block->cluster;
  if (thread.cluster_arrived) scheduler->fail("cluster_arrive twice without a wait");
  thread.cluster_arrived = true;
  thread.cluster_round = cluster.round;
  tsan_release(cluster.tags.of(cluster.round));
  if (++cluster.arrived == cluster.threads.size()) {
    cluster.arrived = 0;
    ++cluster.round;
    scheduler->wake_all(cluster.waiting);
  }
}

void cluster_wait() {
  const TsanIgnore ignore;
  Thread& thread = scheduler->current();
  Cluster& cluster = *thread.block->cluster;
  if (!thread.cluster_arrived) scheduler->fail("cluster_wait without an arrive");
  if (cluster.round == thread.cluster_round) {
    cluster.waiting.push_back(&thread);
    scheduler->wait("the cluster barrier");
  } else {
    scheduler->perhaps_yield();
  }
  thread.cluster_arrived = false;
  tsan_acquire(cluster.tags.of(thread.cluster_round));
}

unsigned cluster_rank() {
  return scheduler->current().block->rank;
}
unsigned cluster_blocks() {
  return static_cast<unsigned>(scheduler->current().block->cluster->blocks.size());
}

namespace {

// All lanes have arrived: gives each its result.
void complete(Warp& warp) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) votes |= warp.operands[lane] != 0 ? 1u << lane : 0u;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    std::uint64_t& result = warp.lanes[lane]->result;
    switch (warp.op) {
      case WarpOp::kBarrier:
        break;
      case WarpOp::kShuffle:
      case WarpOp::kShuffleDown:
      case WarpOp::kShuffleXor:
        result = warp.operands[warp.sources[lane]];
        break;
      case WarpOp::kBallot:
      case WarpOp::kAny:
        result = votes;
        break;
      case WarpOp::kMatch:
        result = 0;
        for (unsigned other = 0; other < kWarp; ++other) {
          if (warp.operands[other] == warp.operands[lane]) result |= 1u << other;
        }
        break;
    }
  }
}

}  // namespace

std::uint64_t warp_collective(WarpOp op, std::uint64_t operand, int source_lane) {
  const TsanIgnore ignore;
  Thread& thread = scheduler->current();
  Warp& warp = *thread.warp;
  if (warp.exited != 0) scheduler->fail(std::string(name_of(op)) + " after a lane of the warp exited");
  if (warp.arrived != 0 && warp.op != op) {
    scheduler->fail(std::string("divergent warp operation: ") + name_of(op) + " where other lanes wait at " +
                    name_of(warp.op));
  }
  warp.op = op;
  warp.operands[thread.lane] = operand;
  warp.sources[thread.lane] = source_lane;
  char* tag = warp.tags.of(warp.round);
  if (op == WarpOp::kBarrier) tsan_release(tag);
  if (++warp.arrived == kWarp) {
    complete(warp);
    warp.arrived = 0;
    ++warp.round;
    for (Thread* lane : warp.lanes) {
      if (lane != &thread) scheduler->wake(lane);
    }
    scheduler->perhaps_yield();
  } else {
    scheduler->wait(name_of(op));
  }
  if (op == WarpOp::kBarrier) tsan_acquire(tag);
  return thread.result;
}

void allow_next_launch() {
  scheduler->trigger(*scheduler->current().block);
}

void wait_for_previous_launch() {
  const TsanIgnore ignore;
  Grid& grid = *scheduler->current().block->grid;
  if (grid.index == 0) return;
  Grid& before = scheduler->grid(grid.index - 1);
  if (!before.ended()) {
    before.dependents.push_back(&scheduler->current());
    scheduler->wait("the end of the launch before");
  }
  tsan_acquire(&before.end_tag);
}

}  // namespace segscatter::simt
