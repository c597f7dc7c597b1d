// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>
#include <limits>

#include "simt_intrinsics.h"

namespace segscatter::core::cuda {

float float_of_half(std::uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  float magnitude;
  if (exponent == 0x1f) {
    magnitude = fraction == 0 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(fraction), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

std::uint16_t half_of_float(float value) {
  if (std::isnan(value)) return 0x7fff;
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (magnitude == 0.0f) return sign;
  if (magnitude >= 65520.0f) return sign | 0x7c00;  // the largest half is 65504; from half a step above it on: infinity
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // In units of the last place: 10 bits after the leading one, or 2^-24 for subnormal numbers.
  const int unit = exponent - 11 < -24 ? -24 : exponent - 11;
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -unit)));  // to nearest even
  // Above the subnormals the leading one is counted in the exponent field; a carry walks into it by itself.
  return static_cast<std::uint16_t>(sign | (((unit + 24) << 10) + steps));
}

}  // namespace segscatter::core::cuda
