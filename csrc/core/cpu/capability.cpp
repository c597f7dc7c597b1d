// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace segscatter::core {
namespace {

CpuCapability best() {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                        __builtin_cpu_supports("popcnt");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const auto built = [](CpuCapability capability) {
    return detail::find_kernels(FloatType::kFloat32, MaskType::kNone, capability).gather != nullptr;
  };
  if (has_avx512 && built(CpuCapability::kAvx512)) return CpuCapability::kAvx512;
  if (has_avx2 && built(CpuCapability::kAvx2)) return CpuCapability::kAvx2;
#endif
  return CpuCapability::kDefault;
}

CpuCapability allowed() {
  const char* name = std::getenv("SEGSCATTER_CPU_CAPABILITY");
  if (name != nullptr && std::strcmp(name, "default") == 0) return CpuCapability::kDefault;
  if (name != nullptr && std::strcmp(name, "avx2") == 0) return CpuCapability::kAvx2;
  return CpuCapability::kAvx512;
}

}  // namespace

CpuCapability cpu_capability() {
  static const CpuCapability capability = best() < allowed() ? best() : allowed();
  return capability;
}

namespace detail {

Kernels find_kernels(FloatType type, MaskType mask, CpuCapability capability) {
  switch (capability) {
    case CpuCapability::kAvx512:
      return kernels_avx512(type, mask);
    case CpuCapability::kAvx2:
      return kernels_avx2(type, mask);
    case CpuCapability::kDefault:
      break;
  }
  return kernels_default(type, mask);
}

}  // namespace detail
}  // namespace segscatter::core
