// SPDX-License-Identifier: Apache-2.0
#include "csrc/core/cuda/reduce_kernels.cuh"

namespace segscatter::core::cuda {

template const ReduceKernels& reduce_kernels<Float16>(int);

}  // namespace segscatter::core::cuda
