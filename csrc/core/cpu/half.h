// SPDX-License-Identifier: Apache-2.0
/// The 16-bit floating types as bits, with conversions that need no instruction set extension.
#pragma once

#include <cstdint>
#include <cstring>

namespace segscatter::core::detail {
namespace {  // included by files compiled for different instruction sets, which must not share functions

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

template <class To, class From>
To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline double to_double(double x) {
  return x;
}
inline double to_double(float x) {
  return x;
}
inline double to_double(BFloat16 x) {
  return bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

/// Exact for all numbers, subnormal ones included.
inline double to_double(Float16 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000) << 16;
  const std::uint32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);  // Inf, NaN
  // Subnormal floats never occur on the way, because a thread may be told to take them for zero.
  constexpr std::uint32_t kRebias = 0x38000000, kOne = 0x00800000;  // 112 and 1 in the exponent
  const float value = magnitude < 0x400 ? bit_cast<float>((magnitude << 13) + kRebias + kOne) - 0x1p-14f
                                        : bit_cast<float>((magnitude << 13) + kRebias);
  return bit_cast<float>(bit_cast<std::uint32_t>(value) | sign);
}

/// Round to nearest, ties to even; NaN stays NaN.
inline BFloat16 to_bfloat16(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  if (x != x) return {static_cast<std::uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline Float16 to_float16(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint16_t sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000);
  const std::uint32_t magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {static_cast<std::uint16_t>(sign | 0x7e00)};   // NaN
  if (magnitude >= 0x477ff000) return {static_cast<std::uint16_t>(sign | 0x7c00)};  // rounds to Inf: 65520 and above
  if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves the subnormal's bits at the end of the significand
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (bit_cast<std::uint32_t>(shifted) - 0x3f000000))};
  }
  const std::uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
  return {static_cast<std::uint16_t>(sign | (rounded - 0x38000000) >> 13)};
}

}  // namespace
}  // namespace segscatter::core::detail
