// SPDX-License-Identifier: Apache-2.0
/// Which kernels exist, as tables of function pointers: every value type is compiled in a file of its own.
#pragma once

#include "csrc/core/cuda/gather.cuh"
#include "csrc/core/cuda/reduce.cuh"

namespace segscatter::core::cuda {

using ReduceKernel = void (*)(ReduceParams);
using GatherKernel = void (*)(GatherParams);

/// The kernels of one value type and mask width. [private_entries]
struct ReduceKernels {
  ReduceKernel cluster[2];
  ReduceKernel partials[2];
  ReduceKernel documents;
};

/// The second kernels, of one kind of sum.
struct CombineKernels {
  ReduceKernel partials[2];  ///< by kCombineThreads
  ReduceKernel documents;
  ReduceKernel documents_by_group;
};

/// `mask_index`: 0, 1, 2 for masks of 1, 4, 8 bytes.
template <class Value>
const ReduceKernels& reduce_kernels(int mask_index);
template <class Sum>
const CombineKernels& combine_kernels();
GatherKernel gather_kernel(FloatType out_type, int mask_index);

constexpr int kMaskWidths = 3;
constexpr int mask_index(int bytes) {
  return bytes == 1 ? 0 : bytes == 4 ? 1 : 2;
}

}  // namespace segscatter::core::cuda
