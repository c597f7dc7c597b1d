// SPDX-License-Identifier: Apache-2.0
// The operators out of ATen's own, for backends without kernels here (MPS, XPU, NPU, ...): the same results to
// rounding. Sums are kept in float64 where the backend has it.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "core_arguments.h"

namespace segscatter {
namespace {

/// OffsetMap's formula on a tensor.
at::Tensor local_offsets(const at::Tensor& cu_seqlens, const core::OffsetMap& map) {
  const at::Tensor x = cu_seqlens.to(at::kLong).clamp_min(0).floor_divide(map.divisor);
  const auto part = [&](const core::OffsetMap::Window& window) { return x.sub(window.begin).clamp(0, window.length); };
  return part(map.windows[0]).add(part(map.windows[1]));
}

/// [T], bool. ATen compares in the tensor's type, so integers are widened until that is exact, and floats checked.
at::Tensor live_tokens(at::Tensor mask, int64_t ignore_index) {
  mask = mask.reshape({-1});
  widen_mask(mask, ignore_index);
  if (mask.scalar_type() != at::kFloat) return mask.to(at::kLong).ne(ignore_index);
  const float number = static_cast<float>(ignore_index);
  const bool exact = number < 0x1p63f && static_cast<int64_t>(number) == ignore_index;
  return exact ? mask.ne(number) : at::ones_like(mask, at::kBool);
}

/// [T], the group of every token; num_groups for tokens that are dead or in no group.
at::Tensor token_groups(const Grouping& grouping, int64_t num_groups, int64_t num_tokens) {
  const core::OffsetMap map = core::make_offset_map(parse_layout("segscatter", grouping.cp_layout), grouping.cp_size,
                                                    grouping.cp_rank, num_tokens);
  const at::Tensor offsets = local_offsets(grouping.cu_seqlens, map);
  const at::TensorOptions options = offsets.options();
  const at::Tensor none = at::scalar_tensor(num_groups, options);
  at::Tensor ids = grouping.group_ids ? grouping.group_ids->to(at::kLong) : at::arange(num_groups, options);
  ids = at::where(ids.ge(0).logical_and(ids.lt(num_groups)), ids, none);
  ids = at::cat({none.reshape({1}), ids, none.reshape({1})});  // before, inside and behind the segments
  at::Tensor groups = ids.index_select(0, at::searchsorted(offsets, at::arange(num_tokens, options), false, true));
  if (grouping.mask) groups = at::where(live_tokens(*grouping.mask, grouping.ignore_index), groups, none);
  return groups;
}

at::ScalarType widest_float(at::Device device) {
  return device.is_mps() ? at::kFloat : at::kDouble;
}

/// Sums in `dtype` and counts, with one entry more for tokens without a group: it takes whatever dead tokens hold.
std::tuple<at::Tensor, at::Tensor> sums_of(const at::Tensor& values, const Grouping& grouping, int64_t num_groups,
                                           at::ScalarType dtype) {
  const at::Tensor groups = token_groups(grouping, num_groups, values.size(-1));
  const at::Tensor sums = at::zeros(with_last(values, num_groups + 1), values.options().dtype(dtype));
  const at::Tensor counts = at::zeros({num_groups + 1}, groups.options());
  sums.index_add_(-1, groups, values.to(dtype));
  counts.index_add_(0, groups, at::ones_like(groups));
  return {sums.narrow(-1, 0, num_groups), counts.narrow(0, 0, num_groups)};
}

std::tuple<at::Tensor, at::Tensor> reduce_composite(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                                    const OptionalTensor& group_ids, int64_t num_groups,
                                                    const OptionalTensor& mask, int64_t ignore_index,
                                                    std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                                    OptionalDtype dtype) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  const at::ScalarType sum_type = check_reduce(values, grouping, num_groups, dtype);
  validate_if_asked(grouping, num_groups, values.size(-1));
  const auto [sums, counts] = sums_of(values, grouping, num_groups, widest_float(values.device()));
  return {sums.to(sum_type).contiguous(), counts.contiguous()};
}

void accumulate_composite(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values, const at::Tensor& cu_seqlens,
                          const OptionalTensor& group_ids, const OptionalTensor& mask, int64_t ignore_index,
                          std::string_view cp_layout, int64_t cp_size, int64_t cp_rank) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  check_accumulate(sums, counts, values, grouping);
  check_no_overlap(sums, counts, values, grouping);
  validate_if_asked(grouping, sums.size(-1), values.size(-1));
  const at::ScalarType dtype = widest_float(values.device());
  const auto [more, live] = sums_of(values, grouping, sums.size(-1), dtype);
  sums.copy_(sums.to(dtype).add(more));
  counts.add_(live);
}

at::Tensor gather_composite(const at::Tensor& source, const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                            int64_t num_tokens, const OptionalTensor& mask, int64_t ignore_index,
                            std::string_view cp_layout, int64_t cp_size, int64_t cp_rank, OptionalDtype dtype) {
  const Grouping grouping{cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank};
  const at::ScalarType out_type = check_gather(source, grouping, num_tokens, dtype);
  validate_if_asked(grouping, source.size(-1), num_tokens);
  const at::Tensor groups = token_groups(grouping, source.size(-1), num_tokens);
  const at::Tensor padded = at::cat({source, at::zeros(with_last(source, 1), source.options())}, -1);
  return padded.index_select(-1, groups).to(out_type);
}

}  // namespace
}  // namespace segscatter

TORCH_LIBRARY_IMPL(segscatter, CompositeExplicitAutograd, m) {
  m.impl("segment_scatter_reduce", segscatter::reduce_composite);
  m.impl("segment_scatter_accumulate_", segscatter::accumulate_composite);
  m.impl("segment_gather", segscatter::gather_composite);
}
