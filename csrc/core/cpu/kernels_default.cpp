// SPDX-License-Identifier: Apache-2.0
// The kernels in plain C++, for every processor.
#include "chunk_kernels.h"

namespace segscatter::core::detail {
namespace {

struct Default {
  template <class M>
  static std::uint64_t live(const M* mask, M ignore) {
    std::uint64_t bits = 0;
    for (int j = 0; j < static_cast<int>(LiveTokens::kBlock); ++j)
      bits |= static_cast<std::uint64_t>(mask[j] != ignore) << j;
    return bits;
  }

  template <class V>
  struct Lanes {
    double sums[kLanes];
    explicit Lanes(const double* from) {
      for (int j = 0; j < kLanes; ++j) sums[j] = from[j];
    }
    void add(const V* values, std::uint32_t live) {
      for (int j = 0; j < kLanes; ++j) sums[j] += live >> j & 1 ? to_double(values[j]) : 0.0;
    }
    void store(double* to) const {
      for (int j = 0; j < kLanes; ++j) to[j] = sums[j];
    }
  };
};

}  // namespace

Kernels kernels_default(FloatType type, MaskType mask) {
  return kernels_of<Default>(type, mask);
}

}  // namespace segscatter::core::detail
