// SPDX-License-Identifier: Apache-2.0
/// Which kernels exist, as tables of function pointers: every value type is compiled in a file of its own.
#pragma once

#include "csrc/core/cuda/gather.cuh"
#include "csrc/core/cuda/params.cuh"
#include "csrc/core/cuda/reduce.cuh"

namespace segscatter::core::cuda {

using ReduceKernel = void (*)(ReduceParams);
using GatherKernel = void (*)(GatherParams);

/// The kernels of one value type and mask width. [private_entries]
struct ReduceKernels {
  ReduceKernel cluster[2];
  ReduceKernel partials[2];
  ReduceKernel documents;
};

/// The second kernels, of one kind of sum.
struct CombineKernels {
  ReduceKernel partials[2];  ///< by kCombineThreads
  ReduceKernel documents;
  ReduceKernel documents_by_group;
};

/// `mask_index`: 0, 1, 2 for masks of 1, 4, 8 bytes.
template <class Value>
const ReduceKernels& reduce_kernels(int mask_index);
template <class Sum>
const CombineKernels& combine_kernels();
GatherKernel gather_kernel(FloatType out_type, int mask_index);

// Defined in a file each; without these, what follows would instantiate all of them wherever the template is in sight.
extern template const ReduceKernels& reduce_kernels<Float16>(int);
extern template const ReduceKernels& reduce_kernels<BFloat16>(int);
extern template const ReduceKernels& reduce_kernels<Float32>(int);
extern template const ReduceKernels& reduce_kernels<double>(int);
extern template const CombineKernels& combine_kernels<FloatSum>();
extern template const CombineKernels& combine_kernels<DoubleSum>();

constexpr int kMaskWidths = 3;
constexpr int mask_index(int bytes) {
  return bytes == 1 ? 0 : bytes == 4 ? 1 : 2;
}

inline const ReduceKernels& reduce_kernels_of(FloatType type, int mask_index) {
  switch (type) {
    case FloatType::kFloat16:
      return reduce_kernels<Float16>(mask_index);
    case FloatType::kBFloat16:
      return reduce_kernels<BFloat16>(mask_index);
    case FloatType::kFloat32:
      return reduce_kernels<Float32>(mask_index);
    default:
      return reduce_kernels<double>(mask_index);
  }
}

inline const CombineKernels& combine_kernels_of(FloatType type) {
  return type == FloatType::kFloat64 ? combine_kernels<DoubleSum>() : combine_kernels<FloatSum>();
}

/// The kernel of launch `i` of a plan. `mask` is one that detail::simplify() gave.
inline ReduceKernel select_kernel(const ReduceArgs& args, const Mask& mask, const ReducePlan& plan, int i) {
  const ReduceKernels& kernels = reduce_kernels_of(args.value_type, mask_index(mask_bytes(mask.type)));
  const CombineKernels& combine = combine_kernels_of(args.value_type);
  const bool last = i + 1 == plan.num_launches;
  switch (plan.path) {
    case ReducePath::kOneLaunch:
      return kernels.cluster[plan.private_entries];
    case ReducePath::kTwoLaunches:
      return last ? combine.partials[plan.launches[i].block == kCombineThreads[1]]
                  : kernels.partials[plan.private_entries];
    default:
      if (!last) return kernels.documents;
      return args.segments.group_ids.data ? combine.documents_by_group : combine.documents;
  }
}

inline GatherKernel select_kernel(const GatherArgs& args, const Mask& mask) {
  return gather_kernel(args.out_type, mask_index(mask_bytes(mask.type)));
}

}  // namespace segscatter::core::cuda
