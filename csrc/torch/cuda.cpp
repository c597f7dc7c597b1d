// SPDX-License-Identifier: Apache-2.0
// The operators on CUDA: the current stream of the tensors' device, one workspace from the caching allocator (which
// makes calls safe on several streams and in captured graphs), no synchronisation.
#include <ATen/cuda/EmptyTensor.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>

#include "core_arguments.h"

namespace segscatter {
namespace {

/// The current device, described once per process.
const core::CudaDevice& current_device() {
  struct Entry {
    std::once_flag once;
    core::CudaDevice device;
  };
  static std::array<Entry, C10_COMPILE_TIME_MAX_GPUS> entries;
  Entry& entry = entries.at(static_cast<std::size_t>(c10::cuda::current_device()));
  std::call_once(entry.once, [&] {
    const core::Status status = core::query_cuda_device(entry.device);
    TORCH_CHECK(status.code != core::Status::Code::kUnsupportedDevice,
                "segscatter has no CUDA kernels for this GPU: it was built for compute "
                "capabilities " SEGSCATTER_CUDA_ARCHITECTURES
                ". Rebuild it for this one, in its source tree: TORCH_CUDA_ARCH_LIST=<major.minor> pip install "
                "--no-build-isolation --force-reinstall --no-deps . (",
                status.message, ")");
    check_status(status);
  });
  return entry.device;
}

/// SEGSCATTER_CUDA_PATH forces a path of the reduction, for measurements and tests: one_launch, two_launches,
/// documents, or one_launch:N with clusters of N blocks.
const core::LaunchChoice& launch_choice() {
  static const core::LaunchChoice choice = [] {
    using Path = core::ReducePath;
    const char* variable = std::getenv("SEGSCATTER_CUDA_PATH");
    const std::string_view path = variable != nullptr ? variable : "";
    if (path == "one_launch") return core::LaunchChoice{Path::kOneLaunch, 0};
    if (path == "two_launches") return core::LaunchChoice{Path::kTwoLaunches, 0};
    if (path == "documents") return core::LaunchChoice{Path::kDocuments, 0};
    for (const int blocks : {1, 2, 4, 8, 16}) {
      if (path == "one_launch:" + std::to_string(blocks)) return core::LaunchChoice{Path::kOneLaunch, blocks};
    }
    TORCH_CHECK_VALUE(
        path.empty(),
        "SEGSCATTER_CUDA_PATH must be one_launch, one_launch:N (N blocks in a cluster: 1, 2, 4, 8 or 16), "
        "two_launches or documents, but is ",
        path);
    return core::LaunchChoice{};
  }();
  return choice;
}

/// On the current device. Not at::empty, which launches a kernel to fill the memory in torch's deterministic mode.
at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cuda(sizes, type, at::Device(at::kCUDA, c10::cuda::current_device()), std::nullopt);
}

void run(const CoreReduce& call) {
  const core::CudaDevice& device = current_device();
  const std::size_t bytes = core::reduce_cuda_workspace(call.args, device, launch_choice());
  at::DataPtr workspace;
  if (bytes != 0) workspace = c10::cuda::CUDACachingAllocator::get()->allocate(bytes);
  check_status(
      core::reduce_cuda(call.args, device, launch_choice(), workspace.get(), bytes, c10::cuda::getCurrentCUDAStream()));
}

std::tuple<at::Tensor, at::Tensor> reduce_cuda(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                               const OptionalTensor& group_ids, int64_t num_groups,
                                               const OptionalTensor& mask, int64_t ignore_index,
                                               std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                               OptionalDtype dtype) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  const at::ScalarType sum_type = check_reduce(values, grouping, num_groups, dtype);
  const c10::cuda::CUDAGuard guard(values.device());
  validate_if_asked(grouping, num_groups, values.size(-1));
  at::Tensor sums = empty(with_last(values, num_groups), sum_type), counts = empty({num_groups}, at::kLong);
  run(CoreReduce(values, grouping, sums, counts, /*accumulate=*/false));
  return {std::move(sums), std::move(counts)};
}

void accumulate_cuda(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values, const at::Tensor& cu_seqlens,
                     const OptionalTensor& group_ids, const OptionalTensor& mask, int64_t ignore_index,
                     std::string_view cp_layout, int64_t cp_size, int64_t cp_rank) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  check_accumulate(sums, counts, values, grouping);
  check_no_overlap(sums, counts, values, grouping);
  const c10::cuda::CUDAGuard guard(values.device());
  validate_if_asked(grouping, sums.size(-1), values.size(-1));
  run(CoreReduce(values, grouping, sums, counts, /*accumulate=*/true));
}

at::Tensor gather_cuda(const at::Tensor& source, const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                       int64_t num_tokens, const OptionalTensor& mask, int64_t ignore_index, std::string_view cp_layout,
                       int64_t cp_size, int64_t cp_rank, OptionalDtype dtype) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  const at::ScalarType out_type = check_gather(source, grouping, num_tokens, dtype);
  const c10::cuda::CUDAGuard guard(source.device());
  validate_if_asked(grouping, source.size(-1), num_tokens);
  at::Tensor out = empty(with_last(source, num_tokens), out_type);
  const CoreGather call(source, grouping, out);
  check_status(core::gather_cuda(call.args, current_device(), c10::cuda::getCurrentCUDAStream()));
  return out;
}

}  // namespace
}  // namespace segscatter

TORCH_LIBRARY_IMPL(segscatter, CUDA, m) {
  m.impl("segment_scatter_reduce", segscatter::reduce_cuda);
  m.impl("segment_scatter_accumulate_", segscatter::accumulate_cuda);
  m.impl("segment_gather", segscatter::gather_cuda);
}
