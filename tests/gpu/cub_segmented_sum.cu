// SPDX-License-Identifier: Apache-2.0
// cub::DeviceSegmentedReduce::Sum over float rows, for the benchmark: the sum of every document, without mask, groups
// or counts. Built with: nvcc -O3 -shared -Xcompiler -fPIC
#include <cub/device/device_segmented_reduce.cuh>

extern "C" int cub_segmented_sum(void* workspace, std::size_t* workspace_bytes, const float* values, float* sums,
                                 std::int64_t num_segments, const std::int64_t* offsets, cudaStream_t stream) {
  return cub::DeviceSegmentedReduce::Sum(workspace, *workspace_bytes, values, sums, num_segments, offsets, offsets + 1,
                                         stream);
}
