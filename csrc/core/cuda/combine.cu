// SPDX-License-Identifier: Apache-2.0
#include "csrc/core/cuda/combine.cuh"

#include "csrc/core/cuda/documents.cuh"
#include "csrc/core/cuda/kernels.cuh"

namespace segscatter::core::cuda {

template <class Sum>
const CombineKernels& combine_kernels() {
  static const CombineKernels kernels = {
      {combine_partials<kCombineThreads[0], Sum>, combine_partials<kCombineThreads[1], Sum>},
      combine_documents<Sum>,
      combine_documents_by_group<Sum>};
  return kernels;
}

template const CombineKernels& combine_kernels<FloatSum>();
template const CombineKernels& combine_kernels<DoubleSum>();

}  // namespace segscatter::core::cuda
