// SPDX-License-Identifier: Apache-2.0
#include "support/runner.h"

#include <gtest/gtest.h>

#include <cstdio>

#include "csrc/core/cuda/kernels.cuh"
#include "csrc/core/cuda/params.cuh"
#include "csrc/core/segments.h"
#include "support/guarded_buffer.h"

namespace segscatter::testing {

using namespace core;

CudaDevice turing() {
  return {75, 64 * 1024, 1};
}
CudaDevice ampere() {
  return {80, 163 * 1024, 1};
}
CudaDevice hopper() {
  return {90, 227 * 1024, 16};
}
CudaDevice blackwell() {
  return {120, 99 * 1024, 8};
}

ReduceSizes sizes_of(const Problem& problem) {
  return {problem.num_tokens, problem.num_segments(), problem.num_groups, problem.num_rows, !problem.identity};
}

namespace {

std::size_t bytes_of(IndexType type) {
  return type == IndexType::kInt64 ? 8 : 4;
}

void store(GuardedBuffer& buffer, std::size_t element_bytes, std::size_t i, std::uint64_t bits) {
  switch (element_bytes) {
    case 1:
      return buffer.set(i, static_cast<std::uint8_t>(bits));
    case 2:
      return buffer.set(i, static_cast<std::uint16_t>(bits));
    case 4:
      return buffer.set(i, static_cast<std::uint32_t>(bits));
    default:
      return buffer.set(i, bits);
  }
}

void store_float(GuardedBuffer& buffer, FloatType type, std::size_t i, double value) {
  if (type == FloatType::kFloat64) {
    buffer.set(i, value);
  } else {
    buffer.set(i, static_cast<float>(value));
  }
}

// The inputs that reduction and adjoint share.
class Inputs {
 public:
  explicit Inputs(const Problem& problem)
      : offset_bytes_(bytes_of(problem.offset_type)),
        id_bytes_(bytes_of(problem.id_type)),
        mask_bytes_(size_of(problem.mask_type)),
        offsets_(problem.offsets.size() * offset_bytes_, offset_bytes_),
        ids_(problem.ids.size() * id_bytes_, id_bytes_),
        mask_(problem.num_tokens * mask_bytes_, problem.misalignment * mask_bytes_) {
    for (std::size_t i = 0; i < problem.offsets.size(); ++i) store(offsets_, offset_bytes_, i, problem.offsets[i]);
    for (std::size_t i = 0; i < problem.ids.size(); ++i) store(ids_, id_bytes_, i, problem.ids[i]);
    if (mask_bytes_ != 0) {
      for (std::int64_t t = 0; t < problem.num_tokens; ++t) store(mask_, mask_bytes_, t, problem.mask[t]);
    }
    segments_.offsets = {offsets_.data(), problem.offset_type};
    segments_.group_ids = {problem.identity ? nullptr : ids_.data(), problem.id_type};
    segments_.num_segments = problem.num_segments();
    segments_.num_groups = problem.num_groups;
    segments_.map = make_offset_map(problem.layout, problem.ranks, problem.rank, problem.num_tokens);
    mask_args_ = {mask_bytes_ != 0 ? mask_.data() : nullptr, problem.mask_type, problem.ignore_index};
    before_ = {offsets_.contents(), ids_.contents(), mask_.contents()};
  }

  const Segments& segments() const { return segments_; }
  const Mask& mask() const { return mask_args_; }
  bool untouched() {
    return offsets_.intact() && ids_.intact() && mask_.intact() &&
           before_ == std::vector<std::vector<unsigned char>>{offsets_.contents(), ids_.contents(), mask_.contents()};
  }

 private:
  std::size_t offset_bytes_, id_bytes_, mask_bytes_;
  GuardedBuffer offsets_, ids_, mask_;
  Segments segments_;
  Mask mask_args_;
  std::vector<std::vector<unsigned char>> before_;
};

template <class Params>
simt::Launch on_shim(const KernelLaunch& launch, void (*kernel)(Params), const Params& params) {
  return {launch.kernel,
          [kernel, params] { kernel(params); },
          static_cast<unsigned>(launch.grid),
          static_cast<unsigned>(launch.block),
          static_cast<unsigned>(launch.cluster),
          static_cast<std::size_t>(launch.shared_bytes),
          launch.dependent};
}

class LaunchReport : public ::testing::Environment {
  void TearDown() override {
    std::printf("%llu kernel launches were simulated\n", static_cast<unsigned long long>(simt::launches_run()));
  }
};
[[maybe_unused]] const auto* const report = ::testing::AddGlobalTestEnvironment(new LaunchReport);

}  // namespace

std::vector<simt::Launch> reduce_launches(const ReduceArgs& args, const ReducePlan& plan, void* workspace) {
  const Mask mask = detail::simplify(args.mask);
  const cuda::ReduceParams params = cuda::make_reduce_params(args, mask, plan, workspace);
  std::vector<simt::Launch> stream;
  for (int i = 0; i < plan.num_launches; ++i) {
    stream.push_back(on_shim(plan.launches[i], cuda::select_kernel(args, mask, plan, i), params));
  }
  return stream;
}

std::vector<simt::Launch> gather_launches(const GatherArgs& args, const GatherPlan& plan) {
  if (plan.num_launches == 0) return {};
  const Mask mask = detail::simplify(args.mask);
  return {on_shim(plan.launch, cuda::select_kernel(args, mask), cuda::make_gather_params(args, mask, plan))};
}

ReduceResult run_reduce(const Problem& problem, const How& how) {
  const ReducePlan plan = plan_reduce(sizes_of(problem), how.device, how.choice);
  EXPECT_TRUE(plan.status.ok()) << plan.status.message;
  if (!plan.status.ok()) return {};
  const std::int64_t rows = problem.num_rows, groups = problem.num_groups, tokens = problem.num_tokens;
  const std::size_t value_bytes = core::size_of(problem.value_type), sum_bytes = core::size_of(problem.sum_type);
  const std::int64_t stride = tokens + problem.row_padding;

  Inputs inputs(problem);
  GuardedBuffer values(rows * stride * value_bytes, problem.misalignment * value_bytes);
  for (std::int64_t k = 0; k < rows; ++k) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      store(values, value_bytes, k * stride + t, problem.values[k * tokens + t]);
    }
  }
  const std::vector<unsigned char> values_before = values.contents();
  const std::size_t off = problem.misalignment % 2;  // as allocators align it, and as little as its type needs
  GuardedBuffer sums(rows * groups * sum_bytes, off * sum_bytes);
  GuardedBuffer counts(groups * sizeof(std::int64_t), off * sizeof(std::int64_t));
  if (problem.accumulate) {
    for (std::int64_t i = 0; i < rows * groups; ++i) store_float(sums, problem.sum_type, i, problem.old_sums[i]);
    for (std::int64_t g = 0; g < groups; ++g) counts.set(g, problem.old_counts[g]);
  }
  GuardedBuffer workspace(plan.workspace.bytes);
  if (how.schedule % 2 != 0) {
    Rng rng(how.schedule);
    for (std::size_t i = 0; i < workspace.size(); ++i) workspace.set(i, static_cast<std::uint8_t>(rng()));
  }

  ReduceArgs args;
  args.values = values.data();
  args.value_type = problem.value_type;
  args.num_rows = rows;
  args.num_tokens = tokens;
  args.row_stride = stride;
  args.segments = inputs.segments();
  args.mask = inputs.mask();
  args.sums = sums.data();
  args.sum_type = problem.sum_type;
  args.counts = static_cast<std::int64_t*>(counts.data());
  args.accumulate = problem.accumulate;
  simt::run(reduce_launches(args, plan, workspace.data()), how.schedule);

  EXPECT_TRUE(inputs.untouched() && values.intact() && values.contents() == values_before) << "an input was written to";
  EXPECT_TRUE(sums.intact()) << "written beside the sums";
  EXPECT_TRUE(counts.intact()) << "written beside the counts";
  EXPECT_TRUE(workspace.intact()) << "written beside the workspace";

  ReduceResult result{sums.contents(), counts.contents(), {}, {}};
  for (std::int64_t i = 0; i < rows * groups; ++i) {
    result.sums.push_back(problem.sum_type == FloatType::kFloat64 ? sums.get<double>(i) : sums.get<float>(i));
  }
  for (std::int64_t g = 0; g < groups; ++g) result.counts.push_back(counts.get<std::int64_t>(g));
  return result;
}

std::vector<std::uint64_t> run_gather(const Problem& problem, const How& how) {
  const std::int64_t rows = problem.num_rows, groups = problem.num_groups, tokens = problem.num_tokens;
  const GatherPlan plan = plan_gather({tokens, problem.num_segments(), groups, rows}, how.device);
  EXPECT_TRUE(plan.status.ok()) << plan.status.message;
  if (!plan.status.ok()) return {};
  const std::size_t source_bytes = core::size_of(problem.sum_type), out_bytes = core::size_of(problem.value_type);

  Inputs inputs(problem);
  GuardedBuffer source(rows * groups * source_bytes, source_bytes);
  for (std::int64_t i = 0; i < rows * groups; ++i) store_float(source, problem.sum_type, i, problem.old_sums[i]);
  const std::vector<unsigned char> source_before = source.contents();
  GuardedBuffer out(rows * tokens * out_bytes, problem.misalignment * out_bytes);

  GatherArgs args;
  args.source = source.data();
  args.source_type = problem.sum_type;
  args.num_rows = rows;
  args.num_tokens = tokens;
  args.segments = inputs.segments();
  args.mask = inputs.mask();
  args.out = out.data();
  args.out_type = problem.value_type;
  simt::run(gather_launches(args, plan), how.schedule);

  EXPECT_TRUE(inputs.untouched() && source.intact() && source.contents() == source_before) << "an input was written to";
  EXPECT_TRUE(out.intact()) << "written beside the result";
  std::vector<std::uint64_t> result(rows * tokens);
  for (std::int64_t i = 0; i < rows * tokens; ++i) {
    result[i] = out_bytes == 8   ? out.get<std::uint64_t>(i)
                : out_bytes == 4 ? out.get<std::uint32_t>(i)
                                 : out.get<std::uint16_t>(i);
  }
  return result;
}

}  // namespace segscatter::testing
