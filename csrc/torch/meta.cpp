// SPDX-License-Identifier: Apache-2.0
// Shapes and dtypes without data, for torch.compile, torch.export and the meta device. Sizes may be symbolic.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"

namespace segscatter {
namespace {

c10::SymDimVector with_last(const at::Tensor& tensor, c10::SymInt last) {
  c10::SymDimVector sizes(tensor.sym_sizes().begin(), tensor.sym_sizes().end());
  sizes.back() = std::move(last);
  return sizes;
}

std::tuple<at::Tensor, at::Tensor> reduce_meta(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                               const OptionalTensor& group_ids, c10::SymInt num_groups,
                                               const OptionalTensor& mask, int64_t ignore_index,
                                               std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                               OptionalDtype dtype) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  const at::ScalarType sum_type = check_reduce(values, grouping, num_groups, dtype);
  return {at::empty_symint(with_last(values, num_groups), values.options().dtype(sum_type)),
          at::empty_symint({num_groups}, values.options().dtype(at::kLong))};
}

void accumulate_meta(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values, const at::Tensor& cu_seqlens,
                     const OptionalTensor& group_ids, const OptionalTensor& mask, int64_t ignore_index,
                     std::string_view cp_layout, int64_t cp_size, int64_t cp_rank) {
  check_accumulate(sums, counts, values, {cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank});
}

at::Tensor gather_meta(const at::Tensor& source, const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                       c10::SymInt num_tokens, const OptionalTensor& mask, int64_t ignore_index,
                       std::string_view cp_layout, int64_t cp_size, int64_t cp_rank, OptionalDtype dtype) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  const at::ScalarType out_type = check_gather(source, grouping, num_tokens, dtype);
  return at::empty_symint(with_last(source, num_tokens), source.options().dtype(out_type));
}

}  // namespace
}  // namespace segscatter

TORCH_LIBRARY_IMPL(segscatter, Meta, m) {
  m.impl("segment_scatter_reduce", segscatter::reduce_meta);
  m.impl("segment_scatter_accumulate_", segscatter::accumulate_meta);
  m.impl("segment_gather", segscatter::gather_meta);
}
