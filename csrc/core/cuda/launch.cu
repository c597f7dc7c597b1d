// SPDX-License-Identifier: Apache-2.0
/// Entry points: plan, parameters, launches.
#include <algorithm>
#include <cstdio>
#include <limits>

#include "csrc/core/cuda/kernels.cuh"
#include "csrc/core/cuda/params.cuh"

namespace segscatter::core {
namespace {

using namespace cuda;

/// A message that says where an error came from. It lives until the thread's next one.
Status cuda_error(const char* where, cudaError_t error, Status::Code code = Status::Code::kCudaError) {
  thread_local char message[256];
  std::snprintf(message, sizeof message, "%s: %s", where, cudaGetErrorString(error));
  cudaGetLastError();  // not to be reported again by whoever asks next
  return {code, message};
}

template <class Params>
Status launch(void (*kernel)(Params), const Params& params, const KernelLaunch& launch, CUstream_st* stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.grid));
  config.blockDim = dim3(static_cast<unsigned>(launch.block));
  config.dynamicSmemBytes = static_cast<std::size_t>(launch.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  if (launch.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  if (launch.dependent) {
    cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
  }
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  return error == cudaSuccess ? Status{} : cuda_error(launch.kernel, error);
}

constexpr FloatType kFloatTypes[] = {FloatType::kFloat16, FloatType::kBFloat16, FloatType::kFloat32,
                                     FloatType::kFloat64};

/// Lets every kernel that keeps sums by group use the device's shared memory and clusters.
cudaError_t allow_everything(const CudaDevice& device) {
  for (const FloatType type : kFloatTypes) {
    for (int mask = 0; mask < kMaskWidths; ++mask) {
      const ReduceKernels& kernels = reduce_kernels_of(type, mask);
      for (int entries = 0; entries < 2; ++entries) {
        const auto cluster = reinterpret_cast<const void*>(kernels.cluster[entries]);
        const auto partials = reinterpret_cast<const void*>(kernels.partials[entries]);
        for (const void* kernel : {cluster, partials}) {
          const cudaError_t error =
              cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, device.shared_memory_per_block);
          if (error != cudaSuccess) return error;
        }
        if (device.compute_capability < 90) continue;
        const cudaError_t error = cudaFuncSetAttribute(cluster, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

/// The largest cluster that the device can place of the kernel that asks for most.
int largest_cluster(const CudaDevice& device) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(16);
  config.blockDim = dim3(kOneLaunchPolicy.threads);
  config.dynamicSmemBytes = static_cast<std::size_t>(std::min(device.shared_memory_per_block, 100 * 1024));
  int blocks = 0;
  const auto kernel = reinterpret_cast<const void*>(reduce_kernels<double>(mask_index(8)).cluster[1]);
  if (cudaOccupancyMaxPotentialClusterSize(&blocks, kernel, &config) != cudaSuccess) {
    cudaGetLastError();
    return 1;
  }
  return blocks >= 16 ? 16 : blocks >= 8 ? 8 : 1;
}

}  // namespace

Status query_cuda_device(CudaDevice& device) {
  const char* where = "query_cuda_device";
  int ordinal = 0;
  cudaError_t error = cudaGetDevice(&ordinal);
  if (error != cudaSuccess) return cuda_error(where, error);
  // Loads the kernels. What they can do depends on the architecture that they were compiled for, which for code that
  // the driver translates from an older one's PTX is not the device's: such code knows no clusters and no dependent
  // launch.
  const auto probe = reinterpret_cast<const void*>(reduce_kernels<Float32>(mask_index(1)).partials[0]);
  cudaFuncAttributes code{};
  error = cudaFuncGetAttributes(&code, probe);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    return cuda_error(where, error, Status::Code::kUnsupportedDevice);
  }
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, ordinal);
  };
  CudaDevice found;
  int major = 0;
  int minor = 0;
  get(major, cudaDevAttrComputeCapabilityMajor);
  get(minor, cudaDevAttrComputeCapabilityMinor);
  get(found.shared_memory_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  int clusters = 0;
  if (code.ptxVersion >= 90) get(clusters, cudaDevAttrClusterLaunch);
  if (error != cudaSuccess) return cuda_error(where, error);
  found.compute_capability = std::min(10 * major + minor, code.ptxVersion);

  error = allow_everything(found);
  if (error != cudaSuccess) return cuda_error(where, error);
  found.max_cluster_blocks = clusters ? largest_cluster(found) : 1;
  device = found;
  return {};
}

std::size_t reduce_cuda_workspace(const ReduceArgs& args, const CudaDevice& device, const LaunchChoice& choice) {
  const ReducePlan plan = plan_reduce(sizes_of(args), device, choice);
  return plan.status.ok() ? plan.workspace.bytes : 0;  // reduce_cuda() says what is wrong
}

Status reduce_cuda(const ReduceArgs& args, const CudaDevice& device, const LaunchChoice& choice, void* workspace,
                   std::size_t workspace_bytes, CUstream_st* stream) {
  if (args.num_rows > std::numeric_limits<int>::max()) {
    return {Status::Code::kInvalidArgument, "more than 2^31 - 1 value rows"};
  }
  const ReducePlan plan = plan_reduce(sizes_of(args), device, choice);
  if (!plan.status.ok()) return plan.status;
  if (workspace_bytes < plan.workspace.bytes) {
    return {Status::Code::kWorkspaceTooSmall, "the workspace is smaller than reduce_cuda_workspace() says"};
  }
  const Mask mask = detail::simplify(args.mask);
  const ReduceParams params = make_reduce_params(args, mask, plan, workspace);
  for (int i = 0; i < plan.num_launches; ++i) {
    const Status status = launch(select_kernel(args, mask, plan, i), params, plan.launches[i], stream);
    if (!status.ok()) return status;
  }
  return {};
}

Status gather_cuda(const GatherArgs& args, const CudaDevice& device, CUstream_st* stream) {
  if (args.num_rows > std::numeric_limits<int>::max()) {
    return {Status::Code::kInvalidArgument, "more than 2^31 - 1 value rows"};
  }
  const GatherPlan plan = plan_gather(sizes_of(args), device);
  if (!plan.status.ok() || !plan.num_launches) return plan.status;
  const Mask mask = detail::simplify(args.mask);
  return launch(select_kernel(args, mask), make_gather_params(args, mask, plan), plan.launch, stream);
}

}  // namespace segscatter::core
