// SPDX-License-Identifier: Apache-2.0
// The simulator itself: that it computes what CUDA computes, and that it finds the mistakes it is there to find.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "shim/simt_intrinsics.h"

namespace segscatter {
namespace {

using namespace core::cuda;  // the names that kernels use
using simt::Launch;

constexpr std::uint64_t kSeeds = 12;

int lane() {
  return thread_index() % kWarpSize;
}

Launch one_block(std::function<void()> kernel, unsigned threads, std::size_t shared_bytes = 0) {
  return {"kernel", std::move(kernel), 1, threads, 1, shared_bytes};
}

TEST(Shim, WarpOperations) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<int> ran(64, 0);
    simt::run({one_block(
                  [&] {
                    EXPECT_EQ(warp_ballot(lane() % 3 == 0), 0x49249249u);
                    EXPECT_TRUE(warp_any(lane() == 17));
                    EXPECT_FALSE(warp_any(false));
                    EXPECT_EQ(warp_match(lane() / 8), 0xffu << (lane() / 8 * 8));
                    EXPECT_EQ(shuffle(lane() * 2, 33), 2);
                    EXPECT_EQ(shuffle(1.5 * lane(), lane() / 2), 1.5 * (lane() / 2));
                    EXPECT_EQ(shuffle_down(lane(), 3), lane() < 29 ? lane() + 3 : lane());
                    EXPECT_EQ(shuffle_xor(float(lane()), 16), float(lane() ^ 16));
                    ++ran[thread_index()];
                  },
                  64)},
              seed);
    EXPECT_EQ(ran, std::vector<int>(64, 1));
  }
}

TEST(Shim, Instructions) {
  EXPECT_EQ(count_ones(0xf0f0u), 8);
  EXPECT_EQ(leading_zeros(0), 32);
  EXPECT_EQ(leading_zeros(1), 31);
  EXPECT_EQ(lowest_one(0), -1);
  EXPECT_EQ(lowest_one(0x80000000u), 31);
  EXPECT_EQ(add_bytes(0x80ff0102u, 1000), 1000u + 0x80 + 0xff + 1 + 2);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(select_bits(0xdeadbeefu, 0x80u << (8 * i), i), 0xdeadbeefu);
    EXPECT_EQ(select_bits(0xdeadbeefu, ~(0x80u << (8 * i)), i), 0u);
  }
}

TEST(Shim, HalfPrecision) {
  EXPECT_EQ(float_of_half(0x3c00), 1.0f);
  EXPECT_EQ(float_of_half(0xc500), -5.0f);
  EXPECT_EQ(float_of_half(0x7bff), 65504.0f);
  EXPECT_EQ(float_of_half(0x0001), std::ldexp(1.0f, -24));
  EXPECT_EQ(half_of_float(65519.0f), 0x7bff);
  EXPECT_EQ(half_of_float(65520.0f), 0x7c00);
  EXPECT_EQ(half_of_float(-std::numeric_limits<float>::infinity()), 0xfc00);
  EXPECT_EQ(half_of_float(std::ldexp(1.0f, -25)), 0);  // a tie, to even
  EXPECT_EQ(half_of_float(std::ldexp(1.5f, -25)), 1);
  EXPECT_EQ(half_of_float(1.0f + std::ldexp(1.0f, -11)), 0x3c00);  // a tie, to even
  EXPECT_EQ(half_of_float(1.0f + std::ldexp(3.0f, -11)), 0x3c02);  // a tie, to even
  EXPECT_TRUE(std::isnan(float_of_half(half_of_float(std::numeric_limits<float>::quiet_NaN()))));
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const float value = float_of_half(static_cast<std::uint16_t>(bits));
    if (!std::isnan(value)) {
      ASSERT_EQ(half_of_float(value), bits);
    }
  }
}

// Two launches with a sum over blocks, the second one early. All schedules give the same.
TEST(Shim, DependentLaunch) {
  constexpr unsigned kBlocks = 6, kThreads = 128;
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    std::vector<int> partial(kBlocks, -1);
    int total = -1;
    const auto first = [&] {
      allow_next_kernel();
      int* sums = reinterpret_cast<int*>(shared_memory());
      sums[thread_index()] = static_cast<int>(block_index() * kThreads) + thread_index();
      for (unsigned half = kThreads / 2; half != 0; half /= 2) {
        block_barrier();
        if (thread_index() < int(half)) sums[thread_index()] += sums[thread_index() + half];
      }
      if (thread_index() == 0) partial[block_index()] = sums[0];
    };
    const auto second = [&] {
      wait_for_previous_kernel();
      if (thread_index() != 0) return;
      total = 0;
      for (int sum : partial) total += sum;
    };
    simt::run({{"first", first, kBlocks, kThreads, 1, kThreads * sizeof(int)}, {"second", second, 1, 32, 1, 0, true}},
              seed);
    EXPECT_EQ(total, int(kBlocks * kThreads * (kBlocks * kThreads - 1) / 2));
  }
}

// A dependent launch that does not wait must sometimes be seen to run too early.
TEST(Shim, DependentLaunchOverlaps) {
  int too_early = 0;
  for (std::uint64_t seed = 1; seed < 60; ++seed) {
    int done = 0;
    const auto first = [&] {
      allow_next_kernel();
      block_barrier();
      if (thread_index() == 0) done = 1;
    };
    const auto second = [&] {
      if (thread_index() == 0) too_early += done == 0;
      wait_for_previous_kernel();
      if (thread_index() == 0) {
        EXPECT_EQ(done, 1);
      }
    };
#if !defined(__SANITIZE_THREAD__)  // the race on `done` is what is shown here
    simt::run({{"first", first, 1, 64, 1, 0}, {"second", second, 1, 32, 1, 0, true}}, seed);
#else
    too_early = 1;
    static_cast<void>(first), static_cast<void>(second);
#endif
  }
  EXPECT_GT(too_early, 0);
}

// Every block sends a number to the next one of its cluster through its shared memory.
TEST(Shim, Clusters) {
  for (unsigned cluster : {1u, 2u, 8u, 16u}) {
    for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
      std::vector<unsigned> received(2 * cluster, ~0u);
      const auto kernel = [&] {
        auto* inbox = reinterpret_cast<unsigned*>(shared_memory());
        EXPECT_EQ(cluster_blocks(), cluster);
        EXPECT_EQ(cluster_rank(), block_index() % cluster);
        cluster_arrive();  // nobody may write to a block that has not begun
        cluster_wait();
        if (thread_index() == 0) *cluster_shared(inbox, (cluster_rank() + 1) % cluster) = block_index();
        cluster_arrive();
        cluster_wait();
        if (thread_index() == 33) received[block_index()] = *inbox;
      };
      simt::run({{"ring", kernel, 2 * cluster, 64, cluster, 16}}, seed);
      for (unsigned block = 0; block < 2 * cluster; ++block) {
        EXPECT_EQ(received[block], block / cluster * cluster + (block % cluster + cluster - 1) % cluster);
      }
    }
  }
}

TEST(Shim, SharedMemoryBeginsRandom) {
  std::vector<unsigned char> first(64), second(64);
  for (auto* bytes : {&first, &second}) {
    simt::run({one_block(
                  [&] {
                    if (thread_index() == 0) std::memcpy(bytes->data(), shared_memory(), bytes->size());
                  },
                  32, 64)},
              bytes == &first ? 1 : 2);
  }
  EXPECT_NE(first, second);
}

TEST(Shim, FirstBlockLeavesOutTheOnesBefore) {
  std::vector<int> ran(8, 0);
  Launch launch{"kernel",
                [&] {
                  if (thread_index() == 0) ++ran[block_index()];
                },
                8,
                32,
                2,
                0};
  launch.first_block = 6;
  simt::run({launch}, 1);
  EXPECT_EQ(ran, (std::vector<int>{0, 0, 0, 0, 0, 0, 1, 1}));
}

// Each mistake stops the program under every schedule.
void expect_death(const std::vector<Launch>& stream, const char* message) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    EXPECT_DEATH(simt::run(stream, seed), message) << "seed " << seed;
  }
}

TEST(ShimDeathTest, BlockBarriers) {
  expect_death(
      {
          one_block(
              [] {
                if (thread_index() < 32) block_barrier();
              },
              64),
      },
      "exited");
  expect_death({one_block([] { thread_index() < 32 ? block_barrier() : void(block_any(true)); }, 64)},
               "divergent block barrier");
}

TEST(ShimDeathTest, WarpOperations) {
  expect_death({one_block([] { lane() < 5 ? void(warp_ballot(true)) : void(warp_any(true)); }, 32)},
               "divergent warp operation");
  expect_death({one_block(
                   [] {
                     if (lane() != 7) warp_barrier();
                   },
                   32)},
               "exited");
  // The bug that a short-circuit && makes.
  expect_death({one_block(
                   [] {
                     if (lane() < 31 && warp_any(true)) warp_barrier();
                     warp_ballot(true);
                   },
                   32)},
               "divergent warp operation");
}

TEST(ShimDeathTest, Deadlock) {
  expect_death({one_block([] { lane() == 3 ? block_barrier() : warp_barrier(); }, 32)}, "deadlock");
  expect_death({{"kernel",
                 [] {
                   cluster_arrive();
                   if (cluster_rank() == 0) block_barrier();
                   if (cluster_rank() == 1) cluster_wait();
                   cluster_wait();
                 },
                 2, 32, 2, 0}},
               "deadlock|without an arrive");
}

TEST(ShimDeathTest, Clusters) {
  expect_death({{"kernel", [] { cluster_arrive(); }, 2, 32, 2, 0}}, "between cluster arrive and wait");
  expect_death({{"kernel", [] { cluster_wait(); }, 2, 32, 2, 0}}, "without an arrive");
  expect_death({{"kernel", [] { cluster_shared(shared_memory(), 2); }, 2, 32, 2, 16}}, "rank outside the cluster");
  expect_death({{"kernel",
                 [] {
                   int local;
                   cluster_shared(&local, 1);
                 },
                 2, 32, 2, 16}},
               "outside dynamic shared");
}

TEST(ShimDeathTest, SharedMemoryOverflow) {
  expect_death({one_block([] { shared_memory()[16 + thread_index()] = 1; }, 32, 16)},
               "beyond the block's dynamic shared memory|use-after-poison");
}

// A block's memory is not there for others before it begins and after it ends.
TEST(ShimDeathTest, SharedMemoryLifetime) {
  const auto write_early = [] {
    auto* inbox = reinterpret_cast<int*>(shared_memory());
    if (thread_index() == 0 && cluster_rank() == 0) *cluster_shared(inbox, 1) = 42;
    cluster_arrive();
    cluster_wait();
    if (cluster_rank() == 1 && *inbox != 42) simt::fail("lost");
  };
  EXPECT_DEATH(simt::run({{"kernel", write_early, 2, 32, 2, 16}}, 0), "lost|use-after-poison");
  const auto read_late = [] {
    auto* outbox = reinterpret_cast<int*>(shared_memory());
    outbox[lane()] = 42;
    cluster_arrive();
    cluster_wait();
    if (cluster_rank() == 0) return;
    for (int i = 0; i < 100; ++i) warp_barrier();
    if (*cluster_shared(outbox, 0) != 42) simt::fail("lost");
  };
  EXPECT_DEATH(simt::run({{"kernel", read_late, 2, 32, 2, 128}}, 0), "lost|use-after-poison|data race");
}

TEST(ShimDeathTest, LaunchConfiguration) {
  const auto nothing = [] {};
  expect_death({{"kernel", nothing, 0, 32, 1, 0}}, "refused");
  expect_death({{"kernel", nothing, 1, 2048, 1, 0}}, "refused");
  expect_death({{"kernel", nothing, 3, 32, 2, 0}}, "refused");
  expect_death({{"kernel", nothing, 1, 32, 1, 300000}}, "refused");
}

#if defined(__SANITIZE_THREAD__)
// What ThreadSanitizer makes of forgotten barriers. A shuffle orders nothing.
TEST(ShimDeathTest, Races) {
  const auto forgotten_block_barrier = [] {
    auto* shared = reinterpret_cast<int*>(shared_memory());
    shared[thread_index()] = 1;
    if (shared[thread_index() ^ 32] == 7) simt::fail("seven");
  };
  EXPECT_DEATH(simt::run({one_block(forgotten_block_barrier, 64, 256)}, 0), "data race");
  const auto forgotten_warp_barrier = [] {
    auto* shared = reinterpret_cast<int*>(shared_memory());
    shared[lane()] = 1;
    warp_any(true);
    if (shared[lane() ^ 1] == 7) simt::fail("seven");
  };
  EXPECT_DEATH(simt::run({one_block(forgotten_warp_barrier, 32, 256)}, 0), "data race");
  int out = 0;
  EXPECT_DEATH(simt::run({{"kernel",
                           [&] {
                             if (thread_index() == 0) out = 1;
                           },
                           2, 32, 1, 0}},
                         0),
               "data race");
  const auto first = [&] {
    allow_next_kernel();
    if (thread_index() == 0) out = 2;
  };
  const auto second = [&] {
    if (out == 7) simt::fail("seven");
    wait_for_previous_kernel();
  };
  EXPECT_DEATH(simt::run({{"first", first, 1, 32, 1, 0}, {"second", second, 1, 32, 1, 0, true}}, 0), "data race");
}

TEST(Shim, BarriersOrderMemory) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    simt::run({{"kernel",
                [] {
                  auto* shared = reinterpret_cast<int*>(shared_memory());
                  for (int round = 0; round < 4; ++round) {
                    shared[thread_index()] = round;
                    warp_barrier();
                    EXPECT_EQ(shared[thread_index() ^ 1], round);
                    block_barrier();
                    EXPECT_EQ(shared[thread_index() ^ 32], round);
                    cluster_arrive();
                    cluster_wait();
                    EXPECT_EQ(cluster_shared(shared, cluster_rank() ^ 1)[thread_index()], round);
                    cluster_arrive();
                    cluster_wait();
                  }
                },
                2, 64, 2, 256}},
              seed);
  }
}
#endif

}  // namespace
}  // namespace segscatter
