// SPDX-License-Identifier: Apache-2.0
// Checks of contents: what the kernels survive but cannot report.
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstdlib>
#include <string_view>

#include "checks.h"

namespace segscatter {
namespace {

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.to(at::kCPU, at::kLong).contiguous();
}

void check_offsets(const Grouping& grouping, int64_t num_tokens) {
  const at::Tensor offsets = on_host(grouping.cu_seqlens);
  const int64_t* cu = offsets.const_data_ptr<int64_t>();
  const int64_t num_segments = offsets.numel() - 1;
  const int64_t row = num_tokens * grouping.cp_size;
  const int64_t pieces = 2 * grouping.cp_size;
  const bool per_document = grouping.cp_layout == "per_document" && grouping.cp_size > 1;
  for (int64_t d = 0; d <= num_segments; ++d) {
    TORCH_CHECK_VALUE(cu[d] >= 0 && cu[d] <= row, "cu_seqlens[", d, "] is ", cu[d], ", outside the row of ", row,
                      " tokens");
    if (d == 0) continue;
    TORCH_CHECK_VALUE(cu[d - 1] <= cu[d], "cu_seqlens decreases at position ", d, ": ", cu[d - 1], ", then ", cu[d]);
    TORCH_CHECK_VALUE(!per_document || (cu[d] - cu[d - 1]) % pieces == 0, "segment ", d - 1, " has ", cu[d] - cu[d - 1],
                      " tokens, cu_seqlens[", d - 1, "] = ", cu[d - 1], " to cu_seqlens[", d, "] = ", cu[d],
                      ", but cp_layout 'per_document' with cp_size ", grouping.cp_size, " needs multiples of ", pieces);
  }
  TORCH_CHECK_VALUE(!per_document || cu[0] % pieces == 0, "cu_seqlens[0] is ", cu[0],
                    ", but cp_layout 'per_document' with cp_size ", grouping.cp_size, " needs a multiple of ", pieces);
}

void check_ids(const at::Tensor& group_ids, int64_t num_groups) {
  const at::Tensor host = on_host(group_ids);
  const int64_t* ids = host.const_data_ptr<int64_t>();
  for (int64_t d = 0; d < host.numel(); ++d) {
    TORCH_CHECK_VALUE(ids[d] >= -1 && ids[d] < num_groups, "group_ids[", d, "] is ", ids[d], ", outside [-1, ",
                      num_groups, "); -1 drops a segment");
  }
}

void validate(const at::Tensor& cu_seqlens, const OptionalTensor& group_ids, int64_t num_groups, int64_t num_tokens,
              std::string_view cp_layout, int64_t cp_size, int64_t cp_rank) {
  const OptionalTensor mask;
  const Grouping grouping{cu_seqlens, group_ids, mask, 0, cp_layout, cp_size, cp_rank};
  TORCH_CHECK_VALUE(num_tokens >= 0, "validate: num_tokens must not be negative, but is ", num_tokens);
  check_segments("validate", grouping, num_groups, num_tokens, cu_seqlens.device(), "cu_seqlens");
  validate_contents(grouping, num_groups, num_tokens);
}

void validate_meta(const at::Tensor&, const OptionalTensor&, c10::SymInt, c10::SymInt, std::string_view, int64_t,
                   int64_t) {}

}  // namespace

void validate_contents(const Grouping& grouping, int64_t num_groups, int64_t num_tokens) {
  check_offsets(grouping, num_tokens);
  if (grouping.group_ids) check_ids(*grouping.group_ids, num_groups);
}

void validate_if_asked(const Grouping& grouping, int64_t num_groups, int64_t num_tokens) {
  static const bool asked = [] {
    const char* value = std::getenv("SEGSCATTER_VALIDATE");
    return value != nullptr && std::string_view(value) == "1";
  }();
  if (asked) validate_contents(grouping, num_groups, num_tokens);
}

}  // namespace segscatter

TORCH_LIBRARY_IMPL(segscatter, CompositeExplicitAutograd, m) {
  m.impl("validate", segscatter::validate);
}
TORCH_LIBRARY_IMPL(segscatter, Meta, m) {
  m.impl("validate", segscatter::validate_meta);
}
