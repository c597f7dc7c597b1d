// SPDX-License-Identifier: Apache-2.0
// More than 2^31 tokens, without their memory: the pages of a sparse mapping that nobody writes share one zero page.
#include <sys/mman.h>

#include "reduce.h"

namespace segscatter::core::test {
namespace {

class SparseBytes {
 public:
  explicit SparseBytes(std::size_t size)
      : size_(size),
        data_(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    madvise(data_, size, MADV_NOHUGEPAGE);
  }
  ~SparseBytes() { munmap(data_, size_); }
  bool ok() const { return data_ != MAP_FAILED; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  std::size_t size_;
  void* data_;
};

TEST(Large, TokensPastTwoToTheThirtyFirst) {
  constexpr std::int64_t kTokens = (std::int64_t{1} << 31) + 40000;
  const SparseBytes values(kTokens * sizeof(std::uint16_t));
  if (!values.ok()) GTEST_SKIP() << "no address space for 4 GiB";
  constexpr std::uint16_t kOne = 0x3f80;  // bfloat16
  for (const std::int64_t t : {std::int64_t{5}, (std::int64_t{1} << 31) - 1, std::int64_t{1} << 31, kTokens - 1}) {
    values.as<std::uint16_t>()[t] = kOne;
  }
  const std::int64_t offsets[] = {0, 5, std::int64_t{1} << 31, kTokens - 1, kTokens};
  const std::int32_t ids[] = {0, 1, 2, 1};
  float sums[3];
  std::int64_t counts[3];
  ReduceArgs args;
  args.values = values.as<void>();
  args.value_type = FloatType::kBFloat16;
  args.num_tokens = kTokens;
  args.segments = {{offsets, IndexType::kInt64},
                   {ids, IndexType::kInt32},
                   4,
                   3,
                   make_offset_map(ContextParallelLayout::kNone, 1, 0, kTokens)};
  args.sums = sums;
  args.counts = counts;
  std::vector<std::uint64_t> workspace(reduce_cpu_workspace(args) / sizeof(std::uint64_t));
  ASSERT_TRUE(reduce_cpu(args, workspace.data(), workspace.size() * sizeof(std::uint64_t)).ok());
  EXPECT_EQ(counts[0], 5);
  EXPECT_EQ(counts[1], (std::int64_t{1} << 31) - 5 + 1);
  EXPECT_EQ(counts[2], kTokens - 1 - (std::int64_t{1} << 31));
  EXPECT_EQ(sums[0], 0.0f);
  EXPECT_EQ(sums[1], 3.0f);
  EXPECT_EQ(sums[2], 1.0f);
}

}  // namespace
}  // namespace segscatter::core::test
