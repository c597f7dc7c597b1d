// SPDX-License-Identifier: Apache-2.0
// Every small problem: up to 6 tokens, 3 segments with all sorted offsets, all ids, all masks, up to 3 groups.
#include "reduce.h"

namespace segscatter::core::test {
namespace {

/// Calls use(offsets) for all non-decreasing offsets of `segments` segments in [0, tokens + 1].
template <class Use>
void for_all_offsets(std::int64_t tokens, std::size_t segments, std::vector<std::int64_t>& offsets, const Use& use) {
  if (offsets.size() == segments + 1) {
    use();
    return;
  }
  for (std::int64_t x = offsets.empty() ? 0 : offsets.back(); x <= tokens + 1; ++x) {
    offsets.push_back(x);
    for_all_offsets(tokens, segments, offsets, use);
    offsets.pop_back();
  }
}

void check_all(CpuCapability capability) {
  std::int64_t calls = 0;
  for (std::int64_t tokens = 0; tokens <= 6; ++tokens) {
    for (std::size_t segments = 0; segments <= 3; ++segments) {
      Problem p;
      for (std::int64_t t = 0; t < tokens; ++t) p.values.push_back(static_cast<float>(1 << t));
      for_all_offsets(tokens, segments, p.offsets, [&] {
        for (unsigned bits = 0; bits < 1u << tokens; ++bits) {
          p.mask.assign(static_cast<std::size_t>(tokens), 0);
          for (std::size_t t = 0; t < p.mask.size(); ++t) p.mask[t] = bits >> t & 1;
          p.identity = false;
          for (p.groups = 1; p.groups <= 3; ++p.groups) {
            const std::int64_t choices = p.groups + 2;  // -1 and one past the end as well
            std::int64_t combinations = 1;
            for (std::size_t d = 0; d < segments; ++d) combinations *= choices;
            for (std::int64_t number = 0; number < combinations; ++number) {
              p.ids.clear();
              for (std::int64_t rest = number; p.ids.size() < segments; rest /= choices) {
                p.ids.push_back(rest % choices - 1);
              }
              ASSERT_EQ(reduce(p, capability), oracle(p));
              ++calls;
            }
          }
          p.identity = true;
          p.groups = static_cast<std::int64_t>(segments);
          ASSERT_EQ(reduce(p, capability), oracle(p));
        }
      });
    }
  }
  EXPECT_GT(calls, 1000000);
}

TEST(Exhaustive, Default) {
  check_all(CpuCapability::kDefault);
}
TEST(Exhaustive, Avx2) {
  if (cpu_capability() < CpuCapability::kAvx2) GTEST_SKIP() << "this processor has no AVX2";
  check_all(CpuCapability::kAvx2);
}
TEST(Exhaustive, Avx512) {
  if (cpu_capability() < CpuCapability::kAvx512) GTEST_SKIP() << "this processor has no AVX-512";
  check_all(CpuCapability::kAvx512);
}

}  // namespace
}  // namespace segscatter::core::test
