// SPDX-License-Identifier: Apache-2.0
// Tokens, documents and rows numbered past 2^31, in memory that is reserved but mostly never touched. Only the last
// blocks run; the others' scratch memory says that they found nothing.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "support/runner.h"

// ThreadSanitizer reserves the addresses itself; these tests are about arithmetic.
#if !defined(__SANITIZE_THREAD__)

namespace segscatter::testing {
namespace {

using namespace core;

constexpr std::int64_t kHuge = std::int64_t{1} << 31;
// The last chunk begins past 2^31, and is short.
constexpr std::int64_t kTokens = kHuge + 1052552;

/// Zeros of which only touched pages exist.
template <class T>
class SparseArray {
 public:
  explicit SparseArray(std::int64_t size) : bytes_(size * sizeof(T)) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    data_ = memory == MAP_FAILED ? nullptr : static_cast<T*>(memory);
  }
  ~SparseArray() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  SparseArray(const SparseArray&) = delete;
  SparseArray& operator=(const SparseArray&) = delete;
  T* data() { return data_; }
  T& operator[](std::int64_t i) { return data_[i]; }

 private:
  std::size_t bytes_;
  T* data_;
};

#define SKIP_WITHOUT(array) \
  if ((array).data() == nullptr) GTEST_SKIP() << "this machine does not reserve so much address space"

std::int64_t chunk_of(const ReducePlan& plan) {
  return std::int64_t{plan.warp_tokens} * (plan.launches[0].block / 32);
}

// A row of four groups, of which only the last `blocks` blocks run; the tokens before theirs are dead. One document
// reaches to the last chunk and into it, to the first of `ends`, which count from that chunk; others follow.
void check_last_blocks(const ReducePlan& plan, std::int64_t tokens, int blocks, const std::vector<std::int64_t>& ends,
                       std::uint64_t schedule) {
  const std::int64_t documents = static_cast<std::int64_t>(ends.size());
  const std::int64_t chunk = chunk_of(plan);
  const std::int64_t last_chunk = (plan.chunks - 1) * chunk;
  ASSERT_LT(last_chunk + ends.back(), tokens) << "choose another number of tokens";

  SparseArray<float> values(tokens);
  SparseArray<std::uint8_t> mask(tokens);
  SKIP_WITHOUT(values);
  SKIP_WITHOUT(mask);
  std::vector<std::int64_t> offsets{0};
  std::vector<std::int32_t> ids;
  for (std::int64_t d = 0; d < documents; ++d) {
    offsets.push_back(last_chunk + ends[d]);
    ids.push_back(static_cast<std::int32_t>((d + 2) % 4));
  }
  std::vector<double> want(4, 0);
  std::vector<std::int64_t> want_counts(4, 0);
  for (std::int64_t t = last_chunk - (blocks - 1) * chunk; t < tokens; ++t) {
    values[t] = static_cast<float>(t % 1000);
    mask[t] = t % 3 != 0;
    for (std::int64_t d = 0; d < documents; ++d) {
      if (mask[t] != 0 && t >= offsets[d] && t < offsets[d + 1]) {
        want[ids[d]] += values[t];
        ++want_counts[ids[d]];
      }
    }
  }
  std::vector<double> sums(4, NAN);
  std::vector<std::int64_t> counts(4, -1);
  std::vector<std::uint64_t> workspace(plan.workspace.bytes / 8 + 1, 0);
  ReduceArgs args;
  args.values = values.data();
  args.num_tokens = tokens;
  args.row_stride = tokens;
  args.segments = {{offsets.data(), IndexType::kInt64}, {ids.data(), IndexType::kInt32}, documents, 4, {}};
  args.segments.map = make_offset_map(ContextParallelLayout::kNone, 1, 0, tokens);
  args.mask = {mask.data(), MaskType::kUInt8, 0};
  args.sums = sums.data();
  args.sum_type = FloatType::kFloat64;
  args.counts = counts.data();
  std::vector<simt::Launch> launches = reduce_launches(args, plan, workspace.data());
  launches[0].first_block = launches[0].blocks - blocks;
  simt::run(launches, schedule);
  EXPECT_EQ(sums, want);
  EXPECT_EQ(counts, want_counts);
}

TEST(Huge, Tokens) {
  for (const ReducePath path : {ReducePath::kTwoLaunches, ReducePath::kDocuments}) {
    const ReducePlan plan = plan_reduce({kTokens, 4, 4, 1, true}, hopper(), {path, 0});
    ASSERT_TRUE(plan.status.ok());
    const std::int64_t last_chunk = (plan.chunks - 1) * chunk_of(plan);
    ASSERT_TRUE(last_chunk > kHuge && kTokens - last_chunk < 50000) << "choose another number of tokens";
    check_last_blocks(plan, kTokens, 1, {500, 2100, 2101, kTokens - 3 - last_chunk}, 5);
  }
}

// Past 2^26 tokens a warp's run may be an odd number of rows, so that its last step is cut short. Documents that start
// just behind it belong to the next warp.
TEST(Huge, StepsCutShort) {
  constexpr std::int64_t kRun = 33 * 256, kChunk = 4 * kRun, kRow = 1987 * kChunk;
  for (std::uint64_t schedule = 0; schedule < 4; ++schedule) {
    for (const ReducePath path : {ReducePath::kTwoLaunches, ReducePath::kDocuments}) {
      const ReducePlan plan = plan_reduce({kRow, 5, 4, 1, true}, hopper(), {path, 0});
      ASSERT_TRUE(plan.status.ok());
      ASSERT_EQ(plan.warp_tokens, kRun) << "choose another number of tokens";
      check_last_blocks(plan, kRow, 2, {5, kRun + 5, 2 * kRun + 5, 3 * kRun + 5, kChunk - 2}, schedule);
    }
  }
}

TEST(Huge, GatheredTokens) {
  const std::int64_t tokens = kTokens;
  const GatherPlan plan = plan_gather({tokens, 2, 2, 2}, hopper());
  ASSERT_TRUE(plan.status.ok());
  SparseArray<float> out(2 * tokens);
  SKIP_WITHOUT(out);
  const std::vector<std::int64_t> offsets{0, tokens - 4900, tokens - 1000};
  const std::vector<float> source{1, 2, 3, 4};
  GatherArgs args;
  args.source = source.data();
  args.num_rows = 2;
  args.num_tokens = tokens;
  args.segments = {{offsets.data(), IndexType::kInt64}, {}, 2, 2, {}};
  args.segments.map = make_offset_map(ContextParallelLayout::kNone, 1, 0, tokens);
  args.out = out.data();
  std::vector<simt::Launch> launches = gather_launches(args, plan);
  launches[0].first_block = launches[0].blocks - 2;  // both rows of the last chunk
  simt::run(launches, 3);
  for (std::int64_t k = 0; k < 2; ++k) {
    for (std::int64_t t = tokens - 5000; t < tokens; ++t) {
      const float want = t >= offsets[2] ? 0 : source[2 * k + (t >= offsets[1])];
      ASSERT_EQ(out[k * tokens + t], want) << "row " << k << ", token " << t;
    }
  }
}

TEST(Huge, Documents) {
  const std::int64_t documents = kHuge + 40, tokens = 1000;
  SparseArray<std::int32_t> offsets(documents + 1), ids(documents);
  SKIP_WITHOUT(offsets);
  SKIP_WITHOUT(ids);
  std::vector<double> want(4, 0);
  std::vector<std::int64_t> want_counts(4, 0);
  std::vector<float> values(tokens);
  for (std::int64_t t = 0; t < tokens; ++t) values[t] = static_cast<float>(t);
  for (std::int64_t d = documents - 40; d <= documents; ++d) offsets[d] = (d - (documents - 40)) * 25;
  for (std::int64_t d = documents - 40; d < documents; ++d) {
    ids[d] = d % 4;
    for (std::int32_t t = offsets[d]; t < offsets[d + 1]; ++t) want[ids[d]] += t, ++want_counts[ids[d]];
  }
  for (const ReducePath path : {ReducePath::kOneLaunch, ReducePath::kTwoLaunches}) {
    const ReducePlan plan = plan_reduce({tokens, documents, 4, 1, true}, hopper(), {path, 0});
    ASSERT_TRUE(plan.status.ok());
    std::vector<double> sums(4, NAN);
    std::vector<std::int64_t> counts(4, -1);
    std::vector<std::uint64_t> workspace(plan.workspace.bytes / 8 + 1, ~std::uint64_t{0});
    ReduceArgs args;
    args.values = values.data();
    args.num_tokens = tokens;
    args.row_stride = tokens;
    args.segments = {{offsets.data(), IndexType::kInt32}, {ids.data(), IndexType::kInt32}, documents, 4, {}};
    args.segments.map = make_offset_map(ContextParallelLayout::kNone, 1, 0, tokens);
    args.sums = sums.data();
    args.sum_type = FloatType::kFloat64;
    args.counts = counts.data();
    simt::run(reduce_launches(args, plan, workspace.data()), 7);
    EXPECT_EQ(sums, want);
    EXPECT_EQ(counts, want_counts);
  }
}

TEST(Huge, RowStride) {
  const std::int64_t tokens = 1000, stride = kHuge + 16;
  SparseArray<float> values(2 * stride + tokens);
  SKIP_WITHOUT(values);
  std::vector<double> want(3, 0);
  for (int k = 0; k < 3; ++k) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      values[k * stride + t] = static_cast<float>(k * 1000 + t);
      want[k] += k * 1000 + t;
    }
  }
  const std::vector<std::int64_t> offsets{0, tokens}, ids{0};
  for (const ReducePath path : {ReducePath::kOneLaunch, ReducePath::kTwoLaunches, ReducePath::kDocuments}) {
    const ReducePlan plan = plan_reduce({tokens, 1, 1, 3, true}, hopper(), {path, 0});
    std::vector<double> sums(3, NAN);
    std::int64_t count = -1;
    std::vector<std::uint64_t> workspace(plan.workspace.bytes / 8 + 1, ~std::uint64_t{0});
    ReduceArgs args;
    args.values = values.data();
    args.num_rows = 3;
    args.num_tokens = tokens;
    args.row_stride = stride;
    args.segments = {{offsets.data(), IndexType::kInt64}, {ids.data(), IndexType::kInt64}, 1, 1, {}};
    args.segments.map = make_offset_map(ContextParallelLayout::kNone, 1, 0, tokens);
    args.sums = sums.data();
    args.sum_type = FloatType::kFloat64;
    args.counts = &count;
    simt::run(reduce_launches(args, plan, workspace.data()), 7);
    EXPECT_EQ(sums, want);
    EXPECT_EQ(count, tokens);
  }
}

}  // namespace
}  // namespace segscatter::testing

#endif
