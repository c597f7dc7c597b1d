// SPDX-License-Identifier: Apache-2.0
#include "checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

namespace segscatter {
namespace {

constexpr const char* kReduce = "segment_scatter_reduce";
constexpr const char* kAccumulate = "segment_scatter_accumulate_";
constexpr const char* kGather = "segment_gather";

// Far more than there are ranks, and so few that no position in a row of that many parts overflows.
constexpr int64_t kMaxContextParallelSize = int64_t{1} << 20;

bool is_value_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}
bool is_sum_dtype(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble;
}
bool is_index_dtype(at::ScalarType type) {
  return type == at::kInt || type == at::kLong;
}
bool is_mask_dtype(at::ScalarType type) {
  return (at::isIntegralType(type, /*includeBool=*/true) && type != at::kUInt64) || is_value_dtype(type);
}

void check_device(const char* op, const char* name, const at::Tensor& tensor, at::Device device,
                  const char* device_of) {
  TORCH_CHECK_VALUE(tensor.device() == device, op, ": ", name, " is on ", tensor.device(), ", but ", device_of,
                    " is on ", device, "; all tensors must be on one device");
}

/// [N] or [K, N] of float16, bfloat16, float32 or float64.
void check_rows(const char* op, const char* name, const char* columns, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.dim() == 1 || tensor.dim() == 2, op, ": ", name, " must have shape [", columns, "] or [K, ",
                    columns, "], but has shape ", tensor.sym_sizes());
  TORCH_CHECK_TYPE(is_value_dtype(tensor.scalar_type()), op, ": ", name,
                   " must be float16, bfloat16, float32 or float64, but is ", tensor.scalar_type());
}

void check_mask(const char* op, const OptionalTensor& mask, const c10::SymInt& num_tokens, at::Device device,
                const char* device_of) {
  if (!mask) return;
  TORCH_CHECK_VALUE(mask->dim() == 1 || (mask->dim() == 2 && mask->sym_size(0) == 1), op,
                    ": mask must have shape [T] or [1, T], but has shape ", mask->sym_sizes());
  TORCH_CHECK_VALUE(mask->sym_size(-1) == num_tokens, op, ": mask has ", mask->sym_size(-1), " elements for ",
                    num_tokens, " tokens; it needs one for each");
  TORCH_CHECK_TYPE(is_mask_dtype(mask->scalar_type()), op,
                   ": mask must be bool, integer (but uint64) or float, but is ", mask->scalar_type());
  check_device(op, "mask", *mask, device, device_of);
}

void check_grouping(const char* op, const Grouping& grouping, const c10::SymInt& num_groups,
                    const c10::SymInt& num_tokens, at::Device device, const char* device_of) {
  check_segments(op, grouping, num_groups, num_tokens, device, device_of);
  check_mask(op, grouping.mask, num_tokens, device, device_of);
}

}  // namespace

core::ContextParallelLayout parse_layout(const char* op, std::string_view layout) {
  using Layout = core::ContextParallelLayout;
  if (layout == "none") return Layout::kNone;
  if (layout == "per_document") return Layout::kPerDocument;
  if (layout == "per_sequence") return Layout::kPerSequence;
  TORCH_CHECK_VALUE(layout == "contiguous", op,
                    ": cp_layout must be 'none', 'per_document', 'per_sequence' or 'contiguous', but is '", layout,
                    "'");
  return Layout::kContiguous;
}

void check_segments(const char* op, const Grouping& grouping, const c10::SymInt& num_groups,
                    const c10::SymInt& num_tokens, at::Device device, const char* device_of) {
  const at::Tensor& cu_seqlens = grouping.cu_seqlens;
  TORCH_CHECK_VALUE(cu_seqlens.dim() == 1, op, ": cu_seqlens must have one dimension, [S + 1], but has shape ",
                    cu_seqlens.sym_sizes());
  TORCH_CHECK_VALUE(cu_seqlens.sym_size(0) >= 1, op,
                    ": cu_seqlens is empty, but must hold S + 1 offsets; [0] means no segments");
  TORCH_CHECK_TYPE(is_index_dtype(cu_seqlens.scalar_type()), op, ": cu_seqlens must be int32 or int64, but is ",
                   cu_seqlens.scalar_type());
  check_device(op, "cu_seqlens", cu_seqlens, device, device_of);

  const c10::SymInt num_segments = cu_seqlens.sym_size(0) - 1;
  TORCH_CHECK_VALUE(num_groups >= 0, op, ": num_groups must not be negative, but is ", num_groups);
  if (grouping.group_ids) {
    const at::Tensor& group_ids = *grouping.group_ids;
    TORCH_CHECK_VALUE(group_ids.dim() == 1, op, ": group_ids must have one dimension, [S], but has shape ",
                      group_ids.sym_sizes());
    TORCH_CHECK_VALUE(group_ids.sym_size(0) == num_segments, op, ": group_ids has ", group_ids.sym_size(0),
                      " elements for the ", num_segments, " segments of cu_seqlens; it needs one for each");
    TORCH_CHECK_TYPE(is_index_dtype(group_ids.scalar_type()), op, ": group_ids must be int32 or int64, but is ",
                     group_ids.scalar_type());
    check_device(op, "group_ids", group_ids, device, device_of);
  } else {
    TORCH_CHECK_VALUE(num_groups == num_segments, op, ": without group_ids every segment is a group, but there are ",
                      num_groups, " groups for ", num_segments, " segments of cu_seqlens");
  }

  const core::ContextParallelLayout layout = parse_layout(op, grouping.cp_layout);
  TORCH_CHECK_VALUE(grouping.cp_size >= 1 && grouping.cp_size <= kMaxContextParallelSize, op,
                    ": cp_size must lie in [1, ", kMaxContextParallelSize, "], but is ", grouping.cp_size);
  TORCH_CHECK_VALUE(grouping.cp_rank >= 0 && grouping.cp_rank < grouping.cp_size, op, ": cp_rank must lie in [0, ",
                    grouping.cp_size, "), but is ", grouping.cp_rank);
  TORCH_CHECK_VALUE(layout != core::ContextParallelLayout::kNone || grouping.cp_size == 1, op,
                    ": cp_layout 'none' means one rank, but cp_size is ", grouping.cp_size);
  if (layout == core::ContextParallelLayout::kPerSequence && grouping.cp_size > 1) {
    TORCH_CHECK_VALUE(num_tokens % 2 == 0, op, ": cp_layout 'per_sequence' needs an even number of tokens, but got ",
                      num_tokens);
  }
}

at::ScalarType check_reduce(const at::Tensor& values, const Grouping& grouping, const c10::SymInt& num_groups,
                            OptionalDtype dtype) {
  check_rows(kReduce, "values", "T", values);
  check_grouping(kReduce, grouping, num_groups, values.sym_size(-1), values.device(), "values");
  const at::ScalarType sum_type = dtype.value_or(values.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  TORCH_CHECK_TYPE(is_sum_dtype(sum_type), kReduce, ": dtype must be float32 or float64, but is ", sum_type);
  return sum_type;
}

void check_accumulate(const at::Tensor& sums, const at::Tensor& counts, const at::Tensor& values,
                      const Grouping& grouping) {
  check_rows(kAccumulate, "values", "T", values);
  TORCH_CHECK_VALUE(sums.dim() == values.dim(), kAccumulate, ": sums must have shape ",
                    values.dim() == 1 ? "[G]" : "[K, G]", " for values of shape ", values.sym_sizes(),
                    ", but has shape ", sums.sym_sizes());
  if (values.dim() == 2) {
    TORCH_CHECK_VALUE(sums.sym_size(0) == values.sym_size(0), kAccumulate, ": sums has ", sums.sym_size(0),
                      " rows, but values has ", values.sym_size(0));
  }
  const c10::SymInt num_groups = sums.sym_size(-1);
  TORCH_CHECK_VALUE(counts.dim() == 1 && counts.sym_size(0) == num_groups, kAccumulate, ": counts must have shape [",
                    num_groups, "] like the last dimension of sums, but has shape ", counts.sym_sizes());
  TORCH_CHECK_TYPE(is_sum_dtype(sums.scalar_type()), kAccumulate, ": sums must be float32 or float64, but is ",
                   sums.scalar_type());
  TORCH_CHECK_TYPE(counts.scalar_type() == at::kLong, kAccumulate, ": counts must be int64, but is ",
                   counts.scalar_type());
  check_device(kAccumulate, "sums", sums, values.device(), "values");
  check_device(kAccumulate, "counts", counts, values.device(), "values");
  TORCH_CHECK_VALUE(sums.is_contiguous(), kAccumulate, ": sums must be contiguous, but has strides ",
                    sums.sym_strides());
  TORCH_CHECK_VALUE(counts.is_contiguous(), kAccumulate, ": counts must be contiguous, but has strides ",
                    counts.sym_strides());
  check_grouping(kAccumulate, grouping, num_groups, values.sym_size(-1), values.device(), "values");
}

void check_no_overlap(const at::Tensor& sums, const at::Tensor& counts, const at::Tensor& values,
                      const Grouping& grouping) {
  at::assert_no_overlap(sums, counts);
  for (const at::Tensor& out : {sums, counts}) {
    at::assert_no_overlap(out, values);
    at::assert_no_overlap(out, grouping.cu_seqlens);
    if (grouping.group_ids) at::assert_no_overlap(out, *grouping.group_ids);
    if (grouping.mask) at::assert_no_overlap(out, *grouping.mask);
  }
}

at::ScalarType check_gather(const at::Tensor& source, const Grouping& grouping, const c10::SymInt& num_tokens,
                            OptionalDtype dtype) {
  check_rows(kGather, "source", "G", source);
  TORCH_CHECK_VALUE(num_tokens >= 0, kGather, ": num_tokens must not be negative, but is ", num_tokens);
  check_grouping(kGather, grouping, source.sym_size(-1), num_tokens, source.device(), "source");
  const at::ScalarType out_type = dtype.value_or(source.scalar_type());
  TORCH_CHECK_TYPE(is_value_dtype(out_type), kGather, ": dtype must be float16, bfloat16, float32 or float64, but is ",
                   out_type);
  return out_type;
}

}  // namespace segscatter
