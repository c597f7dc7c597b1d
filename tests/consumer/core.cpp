// SPDX-License-Identifier: Apache-2.0
// Uses the torch-free core: two documents of one channel each, one token masked.
#include <segscatter/core.h>

#include <cstdio>
#include <vector>

int main() {
  namespace core = segscatter::core;
  const float values[] = {1, 2, 3, 4};
  const std::int32_t offsets[] = {0, 2, 4};
  const std::int32_t ids[] = {1, 0};
  const std::uint8_t mask[] = {1, 0, 1, 1};
  double sums[2];
  std::int64_t counts[2];

  core::ReduceArgs args;
  args.values = values;
  args.num_tokens = 4;
  args.segments = {{offsets, core::IndexType::kInt32},
                   {ids, core::IndexType::kInt32},
                   2,
                   2,
                   core::make_offset_map(core::ContextParallelLayout::kNone, 1, 0, 4)};
  args.mask = {mask, core::MaskType::kUInt8, 0};
  args.sums = sums;
  args.sum_type = core::FloatType::kFloat64;
  args.counts = counts;

  std::vector<std::byte> workspace(core::reduce_cpu_workspace(args) + 64);
  const std::size_t misaligned = reinterpret_cast<std::uintptr_t>(workspace.data()) % 64;
  const core::Status status = core::reduce_cpu(args, workspace.data() + (64 - misaligned) % 64, workspace.size() - 64);
  if (!status.ok()) {
    std::puts(status.message);
    return 1;
  }
  std::printf("%g %g %d %d\n", sums[0], sums[1], static_cast<int>(counts[0]), static_cast<int>(counts[1]));
}
