// SPDX-License-Identifier: Apache-2.0
#include "csrc/core/cuda/gather.cuh"

#include "csrc/core/cuda/kernels.cuh"

namespace segscatter::core::cuda {

GatherKernel gather_kernel(FloatType out_type, int mask_index) {
  static const GatherKernel kernels[3][kMaskWidths] = {
      {gather<std::uint16_t, std::uint8_t>, gather<std::uint16_t, std::uint32_t>, gather<std::uint16_t, std::uint64_t>},
      {gather<std::uint32_t, std::uint8_t>, gather<std::uint32_t, std::uint32_t>, gather<std::uint32_t, std::uint64_t>},
      {gather<std::uint64_t, std::uint8_t>, gather<std::uint64_t, std::uint32_t>,
       gather<std::uint64_t, std::uint64_t>}};
  const std::size_t bytes = size_of(out_type);
  return kernels[bytes == 2 ? 0 : bytes == 4 ? 1 : 2][mask_index];
}

}  // namespace segscatter::core::cuda
