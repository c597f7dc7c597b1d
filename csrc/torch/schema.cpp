// SPDX-License-Identifier: Apache-2.0
// The schemas, and how C++ calls them.
#include <torch/library.h>

#include "ops.h"
#include "segscatter/version.h"

TORCH_LIBRARY(segscatter, m) {
  m.def(
      "segment_scatter_reduce(Tensor values, Tensor cu_seqlens, Tensor? group_ids, SymInt num_groups, *, "
      "Tensor? mask=None, int ignore_index=0, str cp_layout=\"none\", int cp_size=1, int cp_rank=0, "
      "ScalarType? dtype=None) -> (Tensor sums, Tensor counts)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "segment_scatter_accumulate_(Tensor(a!) sums, Tensor(b!) counts, Tensor values, Tensor cu_seqlens, "
      "Tensor? group_ids, *, Tensor? mask=None, int ignore_index=0, str cp_layout=\"none\", int cp_size=1, "
      "int cp_rank=0) -> ()",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "segment_gather(Tensor source, Tensor cu_seqlens, Tensor? group_ids, SymInt num_tokens, *, Tensor? mask=None, "
      "int ignore_index=0, str cp_layout=\"none\", int cp_size=1, int cp_rank=0, ScalarType? dtype=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "validate(Tensor cu_seqlens, Tensor? group_ids, SymInt num_groups, SymInt num_tokens, *, "
      "str cp_layout=\"none\", int cp_size=1, int cp_rank=0) -> ()");
}

namespace segscatter {

const char* library_version() {
  return SEGSCATTER_VERSION;
}

std::tuple<at::Tensor, at::Tensor> segment_scatter_reduce(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                                          const OptionalTensor& group_ids, c10::SymInt num_groups,
                                                          const OptionalTensor& mask, int64_t ignore_index,
                                                          std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                                          OptionalDtype dtype) {
  static const auto op = detail::find_operator<detail::ReduceSignature>("segscatter::segment_scatter_reduce");
  return op.call(values, cu_seqlens, group_ids, std::move(num_groups), mask, ignore_index, cp_layout, cp_size, cp_rank,
                 dtype);
}

void segment_scatter_accumulate_(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values,
                                 const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                                 const OptionalTensor& mask, int64_t ignore_index, std::string_view cp_layout,
                                 int64_t cp_size, int64_t cp_rank) {
  static const auto op = detail::find_operator<detail::AccumulateSignature>("segscatter::segment_scatter_accumulate_");
  op.call(sums, counts, values, cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank);
}

at::Tensor segment_gather(const at::Tensor& source, const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                          c10::SymInt num_tokens, const OptionalTensor& mask, int64_t ignore_index,
                          std::string_view cp_layout, int64_t cp_size, int64_t cp_rank, OptionalDtype dtype) {
  static const auto op = detail::find_operator<detail::GatherSignature>("segscatter::segment_gather");
  return op.call(source, cu_seqlens, group_ids, std::move(num_tokens), mask, ignore_index, cp_layout, cp_size, cp_rank,
                 dtype);
}

}  // namespace segscatter
