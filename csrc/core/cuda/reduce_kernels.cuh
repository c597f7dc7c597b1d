// SPDX-License-Identifier: Apache-2.0
/// Instantiates the first kernels of one value type.
#pragma once

#include "csrc/core/cuda/documents.cuh"
#include "csrc/core/cuda/kernels.cuh"

namespace segscatter::core::cuda {

template <class Value, class MaskWord>
constexpr ReduceKernels make_reduce_kernels() {
  return {{reduce_cluster<false, Value, MaskWord>, reduce_cluster<true, Value, MaskWord>},
          {reduce_partials<false, Value, MaskWord>, reduce_partials<true, Value, MaskWord>},
          reduce_documents<Value, MaskWord>};
}

template <class Value>
const ReduceKernels& reduce_kernels(int mask_index) {
  static const ReduceKernels kernels[kMaskWidths] = {make_reduce_kernels<Value, std::uint8_t>(),
                                                     make_reduce_kernels<Value, std::uint32_t>(),
                                                     make_reduce_kernels<Value, std::uint64_t>()};
  return kernels[mask_index];
}

}  // namespace segscatter::core::cuda
