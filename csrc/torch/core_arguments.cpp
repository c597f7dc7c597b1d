// SPDX-License-Identifier: Apache-2.0
#include "core_arguments.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/Exception.h>

namespace segscatter {
namespace {

core::IndexArray index_array(const at::Tensor& tensor) {
  return {tensor.const_data_ptr(),
          tensor.scalar_type() == at::kLong ? core::IndexType::kInt64 : core::IndexType::kInt32};
}

core::Mask core_mask(at::Tensor& mask, int64_t ignore_index) {
  widen_mask(mask, ignore_index);
  mask = mask.contiguous();
  switch (mask.scalar_type()) {
    case at::kChar:
      return {mask.const_data_ptr(), core::MaskType::kInt8, ignore_index};
    case at::kInt:
      return {mask.const_data_ptr(), core::MaskType::kInt32, ignore_index};
    case at::kLong:
      return {mask.const_data_ptr(), core::MaskType::kInt64, ignore_index};
    case at::kFloat:
      return {mask.const_data_ptr(), core::MaskType::kFloat32, ignore_index};
    default:  // bool, uint8
      return {mask.const_data_ptr(), core::MaskType::kUInt8, ignore_index};
  }
}

/// The same rows with neighbouring tokens next to each other in memory.
at::Tensor with_dense_rows(const at::Tensor& values) {
  return values.stride(-1) == 1 || values.size(-1) <= 1 ? values : values.contiguous();
}

}  // namespace

core::FloatType float_type(at::ScalarType type) {
  switch (type) {
    case at::kHalf:
      return core::FloatType::kFloat16;
    case at::kBFloat16:
      return core::FloatType::kBFloat16;
    case at::kDouble:
      return core::FloatType::kFloat64;
    default:
      return core::FloatType::kFloat32;
  }
}

void widen_mask(at::Tensor& mask, int64_t& ignore_index) {
  const at::ScalarType type = mask.scalar_type();
  if (type == at::kHalf || type == at::kBFloat16) mask = mask.to(at::kFloat);
  if (type == at::kShort || type == at::kUInt16) mask = mask.to(at::kInt);
  if (type == at::kUInt32) mask = mask.to(at::kLong);
  if (type == at::kDouble) {
    const double number = static_cast<double>(ignore_index);
    const bool exact = number < 0x1p63 && static_cast<int64_t>(number) == ignore_index;
    mask = exact ? mask.ne(number) : at::ones_like(mask, at::kBool);  // what no element can be, none is
    ignore_index = 0;
  }
}

CoreGrouping::CoreGrouping(const Grouping& grouping, int64_t num_groups, int64_t num_tokens)
    : cu_seqlens(grouping.cu_seqlens.contiguous()) {
  segments.offsets = index_array(cu_seqlens);
  segments.num_segments = cu_seqlens.size(0) - 1;
  segments.num_groups = num_groups;
  if (grouping.group_ids && segments.num_segments > 0) {  // with no segments there is no data to point to
    group_ids = grouping.group_ids->contiguous();
    segments.group_ids = index_array(group_ids);
  }
  segments.map = core::make_offset_map(parse_layout("segscatter", grouping.cp_layout), grouping.cp_size,
                                       grouping.cp_rank, num_tokens);
  if (grouping.mask) {
    mask = *grouping.mask;
    core_mask = segscatter::core_mask(mask, grouping.ignore_index);
  }
}

CoreReduce::CoreReduce(const at::Tensor& values_, const Grouping& grouping_, const at::Tensor& sums,
                       const at::Tensor& counts, bool accumulate)
    : values(with_dense_rows(values_)), grouping(grouping_, sums.size(-1), values.size(-1)) {
  args.values = values.const_data_ptr();
  args.value_type = float_type(values.scalar_type());
  args.num_rows = values.dim() == 2 ? values.size(0) : 1;
  args.num_tokens = values.size(-1);
  args.row_stride = values.dim() == 2 ? values.stride(0) : 0;
  args.segments = grouping.segments;
  args.mask = grouping.core_mask;
  args.sums = sums.mutable_data_ptr();
  args.sum_type = float_type(sums.scalar_type());
  args.counts = counts.mutable_data_ptr<int64_t>();
  args.accumulate = accumulate;
}

CoreGather::CoreGather(const at::Tensor& source_, const Grouping& grouping_, const at::Tensor& out)
    : source(source_.contiguous()), grouping(grouping_, source.size(-1), out.size(-1)) {
  args.source = source.const_data_ptr();
  args.source_type = float_type(source.scalar_type());
  args.num_rows = source.dim() == 2 ? source.size(0) : 1;
  args.num_tokens = out.size(-1);
  args.segments = grouping.segments;
  args.mask = grouping.core_mask;
  args.out = out.mutable_data_ptr();
  args.out_type = float_type(out.scalar_type());
}

at::DimVector with_last(const at::Tensor& tensor, int64_t last) {
  at::DimVector sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes.back() = last;
  return sizes;
}

void check_status(const core::Status& status) {
  TORCH_CHECK(status.ok(), "segscatter: ", status.message);
}

}  // namespace segscatter
