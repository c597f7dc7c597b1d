// SPDX-License-Identifier: Apache-2.0
// Baseline and floors on a GPU: cub::DeviceSegmentedReduce over documents, and a kernel that does nothing.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_segmented_reduce.cuh>

namespace {

struct SumAndCount {
  float sum, count;
};
struct Add {
  __device__ SumAndCount operator()(SumAndCount a, SumAndCount b) const { return {a.sum + b.sum, a.count + b.count}; }
};
struct LiveToken {
  const float* losses;
  const bool* mask;
  __device__ SumAndCount operator()(int t) const {
    return mask[t] ? SumAndCount{losses[t], 1.f} : SumAndCount{0.f, 0.f};
  }
};

__global__ void empty() {}

void empty_kernel() {
  empty<<<1, 32, 0, c10::cuda::getCurrentCUDAStream()>>>();
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

/// [S, 2] float32 sums and counts of documents, from float32 losses, a bool mask and int32 offsets.
at::Tensor segmented_reduce(const at::Tensor& losses, const at::Tensor& mask, const at::Tensor& cu_seqlens) {
  const int num_segments = static_cast<int>(cu_seqlens.numel() - 1);
  at::Tensor out = at::empty({num_segments, 2}, losses.options());
  const auto input = thrust::make_transform_iterator(
      thrust::make_counting_iterator(0), LiveToken{losses.const_data_ptr<float>(), mask.const_data_ptr<bool>()});
  const int* offsets = cu_seqlens.const_data_ptr<int>();
  auto* result = reinterpret_cast<SumAndCount*>(out.mutable_data_ptr<float>());
  const auto run = [&](void* workspace, size_t& bytes) {
    C10_CUDA_CHECK(cub::DeviceSegmentedReduce::Reduce(workspace, bytes, input, result, num_segments, offsets,
                                                      offsets + 1, Add{}, SumAndCount{0.f, 0.f},
                                                      c10::cuda::getCurrentCUDAStream()));
  };
  size_t bytes = 0;
  run(nullptr, bytes);
  const at::Tensor workspace = at::empty({static_cast<int64_t>(bytes)}, losses.options().dtype(at::kByte));
  run(workspace.mutable_data_ptr(), bytes);
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(segscatter_benchmark, m) {
  m.def("empty_kernel", &empty_kernel);
  m.def("segmented_reduce", &segmented_reduce);
}
