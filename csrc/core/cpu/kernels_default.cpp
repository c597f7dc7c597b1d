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
    double sums[kLanes] = {};
    Lanes() = default;
    explicit Lanes(const double* from) {
      for (int j = 0; j < kLanes; ++j) sums[j] = from[j];
    }
    void add(const V* values, std::uint32_t live) {
      for (; live != 0; live &= live - 1) {
        const int j = __builtin_ctz(live);
        sums[j] += to_double(values[j]);
      }
    }
    void store(double* to) const {
      for (int j = 0; j < kLanes; ++j) to[j] = sums[j];
    }
    double sum() const {
      double s[8];
      for (int j = 0; j < 8; ++j) s[j] = sums[j] + sums[j + 8];
      for (int j = 0; j < 4; ++j) s[j] += s[j + 4];
      for (int j = 0; j < 2; ++j) s[j] += s[j + 2];
      return s[0] + s[1];
    }
  };
};

}  // namespace

Kernels kernels_default(FloatType type, MaskType mask) {
  return kernels_of<Default>(type, mask);
}

}  // namespace segscatter::core::detail
