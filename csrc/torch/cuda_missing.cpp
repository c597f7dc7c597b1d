// SPDX-License-Identifier: Apache-2.0
// What a build without CUDA kernels says to CUDA tensors: falling back silently would cost users the speed they came
// for.
#include <ATen/core/stack.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

namespace segscatter {
namespace {

void explain(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": this segscatter was built without CUDA kernels, but was given CUDA tensors. Install a CUDA build of torch and "
      "the CUDA Toolkit (nvcc), then rebuild it in its source tree: SEGSCATTER_CUDA=ON pip install "
      "--no-build-isolation "
      "--force-reinstall --no-deps .");
}

}  // namespace
}  // namespace segscatter

TORCH_LIBRARY_IMPL(segscatter, CUDA, m) {
  m.impl("segment_scatter_reduce", torch::CppFunction::makeFromBoxedFunction<&segscatter::explain>());
  m.impl("segment_scatter_accumulate_", torch::CppFunction::makeFromBoxedFunction<&segscatter::explain>());
  m.impl("segment_gather", torch::CppFunction::makeFromBoxedFunction<&segscatter::explain>());
}
