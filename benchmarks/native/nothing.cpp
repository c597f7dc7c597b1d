// SPDX-License-Identifier: Apache-2.0
// The floor of any operator: the arguments of segment_scatter_reduce, and nothing done with them.
#include <torch/library.h>

#include <optional>

namespace {

void nothing(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, std::int64_t,
             const std::optional<at::Tensor>&, std::int64_t, c10::string_view, std::int64_t, std::int64_t,
             std::optional<at::ScalarType>) {}

}  // namespace

TORCH_LIBRARY_FRAGMENT(segscatter_benchmark, m) {
  m.def(
      "nothing(Tensor values, Tensor cu_seqlens, Tensor? group_ids, int num_groups, *, Tensor? mask=None, "
      "int ignore_index=0, str cp_layout=\"none\", int cp_size=1, int cp_rank=0, ScalarType? dtype=None) -> ()");
}

TORCH_LIBRARY_IMPL(segscatter_benchmark, CPU, m) {
  m.impl("nothing", &nothing);
}
TORCH_LIBRARY_IMPL(segscatter_benchmark, CUDA, m) {
  m.impl("nothing", &nothing);
}
