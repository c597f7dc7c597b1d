// SPDX-License-Identifier: Apache-2.0
// The operators on the CPU.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include "core_arguments.h"

namespace segscatter {
namespace {

/// torch's own threads.
core::Executor executor() {
  const auto run = [](void*, int tasks, void (*task)(void*, int), void* argument) {
    at::parallel_for(0, tasks, 1, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) task(argument, static_cast<int>(i));
    });
  };
  return {at::in_parallel_region() ? 1 : at::get_num_threads(), run, nullptr};
}

void run(const CoreReduce& call) {
  const core::Executor threads = executor();
  const std::size_t bytes = core::reduce_cpu_workspace(call.args, threads);
  const at::DataPtr workspace = c10::GetCPUAllocator()->allocate(bytes);
  check_status(core::reduce_cpu(call.args, workspace.get(), bytes, threads));
}

/// Without the dispatcher's way to at::empty, which takes as long as a short reduction.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, type);
}

std::tuple<at::Tensor, at::Tensor> reduce_cpu(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                              const OptionalTensor& group_ids, int64_t num_groups,
                                              const OptionalTensor& mask, int64_t ignore_index,
                                              std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                              OptionalDtype dtype) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  const at::ScalarType sum_type = check_reduce(values, grouping, num_groups, dtype);
  validate_if_asked(grouping, num_groups, values.size(-1));
  at::Tensor sums = empty(with_last(values, num_groups), sum_type), counts = empty({num_groups}, at::kLong);
  run(CoreReduce(values, grouping, sums, counts, /*accumulate=*/false));
  return {std::move(sums), std::move(counts)};
}

void accumulate_cpu(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values, const at::Tensor& cu_seqlens,
                    const OptionalTensor& group_ids, const OptionalTensor& mask, int64_t ignore_index,
                    std::string_view cp_layout, int64_t cp_size, int64_t cp_rank) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  check_accumulate(sums, counts, values, grouping);
  check_no_overlap(sums, counts, values, grouping);
  validate_if_asked(grouping, sums.size(-1), values.size(-1));
  run(CoreReduce(values, grouping, sums, counts, /*accumulate=*/true));
}

at::Tensor gather_cpu(const at::Tensor& source, const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                      int64_t num_tokens, const OptionalTensor& mask, int64_t ignore_index, std::string_view cp_layout,
                      int64_t cp_size, int64_t cp_rank, OptionalDtype dtype) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  const at::ScalarType out_type = check_gather(source, grouping, num_tokens, dtype);
  validate_if_asked(grouping, source.size(-1), num_tokens);
  at::Tensor out = empty(with_last(source, num_tokens), out_type);
  check_status(core::gather_cpu(CoreGather(source, grouping, out).args, executor()));
  return out;
}

}  // namespace
}  // namespace segscatter

TORCH_LIBRARY_IMPL(segscatter, CPU, m) {
  m.impl("segment_scatter_reduce", segscatter::reduce_cpu);
  m.impl("segment_scatter_accumulate_", segscatter::accumulate_cpu);
  m.impl("segment_gather", segscatter::gather_cpu);
}
