// SPDX-License-Identifier: Apache-2.0
/// Value types as they lie in memory, and running sums of them.
#pragma once

#include <type_traits>

#include "csrc/core/cuda/intrinsics.cuh"

namespace segscatter::core::cuda {

// Values stay bit patterns until they are known to be live: a dead NaN must not reach an addition.
struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
struct Float32 {
  std::uint32_t bits;
};

/// The bits of the same number as a float.
SEGSCATTER_DEVICE std::uint32_t widen(Float32 value) {
  return value.bits;
}
SEGSCATTER_DEVICE std::uint32_t widen(BFloat16 value) {
  return static_cast<std::uint32_t>(value.bits) << 16;
}
SEGSCATTER_DEVICE std::uint32_t widen(Float16 value) {
  return bits_of_float(float_of_half(value.bits));
}
SEGSCATTER_DEVICE double widen(double value) {
  return value;
}

/// bfloat16, rounding to nearest even; NaN stays NaN.
SEGSCATTER_DEVICE std::uint16_t bfloat16_of_float(float value) {
  const std::uint32_t bits = bits_of_float(value);
  if (value != value) return 0x7fff;
  return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/// A value where bit 7 of byte `i` of `flags` is set, else zero.
SEGSCATTER_DEVICE float select(std::uint32_t bits, std::uint32_t flags, int i) {
  return float_of_bits(select_bits(bits, flags, i));
}
SEGSCATTER_DEVICE double select(double value, std::uint32_t flags, int i) {
  return flags & (0x80u << (8 * i)) ? value : 0.0;
}

/// A sum of floats with the quality of float64, in float arithmetic (TwoSum: `high` is the rounded sum, `low` what the
/// roundings lost), because float64 runs at 1/64 of the rate on some GPUs. Finite sums past FLT_MAX become infinite.
struct alignas(8) FloatSum {
  float high = 0.f;
  float low = 0.f;

  SEGSCATTER_DEVICE void add(float value) {
    const float sum = high + value;
    const float added = sum - high;
    low += (high - (sum - added)) + (value - added);
    high = sum;
  }
  SEGSCATTER_DEVICE void add(const FloatSum& other) {
    add(other.high);
    low += other.low;
  }
  /// Infinity and NaN are in `high`; they make `low` NaN.
  SEGSCATTER_DEVICE double value() const {
    return static_cast<double>(high) + (low - low == 0.f ? static_cast<double>(low) : 0.0);
  }
};

struct alignas(8) DoubleSum {
  double sum = 0.0;

  SEGSCATTER_DEVICE void add(double value) { sum += value; }
  SEGSCATTER_DEVICE void add(const DoubleSum& other) { sum += other.sum; }
  SEGSCATTER_DEVICE double value() const { return sum; }
};

template <class Value>
using SumOf = std::conditional_t<std::is_same_v<Value, double>, DoubleSum, FloatSum>;

SEGSCATTER_DEVICE FloatSum shuffle(const FloatSum& sum, int lane) {
  return {shuffle(sum.high, lane), shuffle(sum.low, lane)};
}
SEGSCATTER_DEVICE DoubleSum shuffle(const DoubleSum& sum, int lane) {
  return {shuffle(sum.sum, lane)};
}
SEGSCATTER_DEVICE FloatSum shuffle_down(const FloatSum& sum, int distance) {
  return {shuffle_down(sum.high, distance), shuffle_down(sum.low, distance)};
}
SEGSCATTER_DEVICE DoubleSum shuffle_down(const DoubleSum& sum, int distance) {
  return {shuffle_down(sum.sum, distance)};
}
SEGSCATTER_DEVICE FloatSum shuffle_xor(const FloatSum& sum, int mask) {
  return {shuffle_xor(sum.high, mask), shuffle_xor(sum.low, mask)};
}
SEGSCATTER_DEVICE DoubleSum shuffle_xor(const DoubleSum& sum, int mask) {
  return {shuffle_xor(sum.sum, mask)};
}

/// Adds `sum` and `count` up over the lanes of the warp, by a fixed tree; all lanes get the result.
template <class Sum, class Count>
SEGSCATTER_DEVICE void add_over_warp(Sum& sum, Count& count) {
  SEGSCATTER_UNROLL
  for (int distance = kWarpSize / 2; distance; distance /= 2) {
    sum.add(shuffle_xor(sum, distance));
    count += shuffle_xor(count, distance);
  }
}

/// Adds `sum` and `count` up over the lanes that `take_part` with the same `key` (not 0), in lane order, by a tree.
/// Returns whether the calling lane is the lowest of them, which then has the result.
template <class Sum, class Count>
SEGSCATTER_DEVICE bool add_over_equal(bool take_part, std::uint32_t key, int lane, Sum& sum, Count& count) {
  const std::uint32_t below = (1u << lane) - 1;
  const std::uint32_t equal = warp_match(take_part ? key : 0);
  std::uint32_t rank = count_ones(equal & below);
  std::uint32_t above = equal & ~((2u << lane) - 1);
  while (warp_any(take_part && above)) {
    const int next = above ? lowest_one(above) : lane;
    const Sum other = shuffle(sum, next);
    const Count other_count = shuffle(count, next);
    if (above) {
      sum.add(other);
      count += other_count;
    }
    above &= ~warp_ballot(rank & 1);  // those have handed theirs down
    rank >>= 1;
  }
  return take_part && !(equal & below);
}

}  // namespace segscatter::core::cuda
