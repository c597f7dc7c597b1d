// SPDX-License-Identifier: Apache-2.0
/// What CPU and CUDA kernels must agree on: which local token an offset means, which group a segment has, which tokens
/// are live. One definition for both.
#pragma once

#include <cstdint>

#include "segscatter/core.h"

#if defined(__CUDACC__)
#define SEGSCATTER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SEGSCATTER_HOST_DEVICE static inline  // internal: files compiled for different instruction sets must not share
#endif

namespace segscatter::core::detail {

SEGSCATTER_HOST_DEVICE std::int64_t clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return x < low ? low : x > high ? high : x;
}

/// OffsetMap's formula. Safe for every x: after max(x, 0) nothing can overflow.
SEGSCATTER_HOST_DEVICE std::int64_t local_offset(const OffsetMap& map, std::int64_t x) {
  x = x < 0 ? 0 : x;
  if (map.divisor != 1) x /= map.divisor;
  std::int64_t local = clamp(x - map.windows[0].begin, 0, map.windows[0].length);
  if (map.windows[1].length != 0) local += clamp(x - map.windows[1].begin, 0, map.windows[1].length);
  return local;
}

SEGSCATTER_HOST_DEVICE std::int64_t load_index(const IndexArray& array, std::int64_t i) {
  return array.type == IndexType::kInt64 ? static_cast<const std::int64_t*>(array.data)[i]
                                         : static_cast<const std::int32_t*>(array.data)[i];
}

/// The group of segment d, or -1 where it has none. num_groups limits identity groups too.
SEGSCATTER_HOST_DEVICE std::int64_t group_of(const Segments& segments, std::int64_t d) {
  const std::int64_t g = segments.group_ids.data ? load_index(segments.group_ids, d) : d;
  return g >= 0 && g < segments.num_groups ? g : -1;
}

/// The same mask with a type that a kernel knows (kNone, kUInt8, kInt32, kInt64 or kFloat32): kNone where no element
/// can equal ignore_index, and kInt8 as the byte pattern of kUInt8.
static inline Mask simplify(Mask mask) {
  const std::int64_t ignore = mask.ignore_index;
  bool can_match = true;
  switch (mask.type) {
    case MaskType::kUInt8:
      can_match = ignore >= 0 && ignore <= 255;
      break;
    case MaskType::kInt8:
      can_match = ignore >= -128 && ignore <= 127;
      mask.type = MaskType::kUInt8;
      mask.ignore_index = static_cast<std::uint8_t>(ignore);
      break;
    case MaskType::kInt32:
      can_match = ignore == static_cast<std::int32_t>(ignore);
      break;
    case MaskType::kFloat32:
      // A float holds all integers to 2^24 and some beyond; the bound keeps the conversion back defined.
      can_match =
          static_cast<float>(ignore) < 0x1p63f && static_cast<std::int64_t>(static_cast<float>(ignore)) == ignore;
      break;
    case MaskType::kNone:
    case MaskType::kInt64:
      break;
  }
  return can_match ? mask : Mask{};
}

}  // namespace segscatter::core::detail
