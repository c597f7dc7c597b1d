// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace segscatter::core {
namespace {

CpuCapability best() {
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const auto built = [](detail::Kernels kernels) { return kernels.reduce_groups != nullptr; };
  if (has_avx512 && built(detail::reduce_kernels_avx512(FloatType::kFloat32, MaskType::kNone))) {
    return CpuCapability::kAvx512;
  }
  if (has_avx2 && built(detail::reduce_kernels_avx2(FloatType::kFloat32, MaskType::kNone))) {
    return CpuCapability::kAvx2;
  }
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

}  // namespace segscatter::core
