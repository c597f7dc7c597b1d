// SPDX-License-Identifier: Apache-2.0
/// The operators as the dispatcher knows them: C++ signatures of the schemas in schema.cpp, and calls through the
/// dispatcher for code that needs an operator to implement another.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>

namespace segscatter {

using OptionalTensor = std::optional<at::Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

using ReduceSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                                           const OptionalTensor& group_ids, c10::SymInt num_groups,
                                                           const OptionalTensor& mask, int64_t ignore_index,
                                                           std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                                           OptionalDtype dtype);

using AccumulateSignature = void(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values,
                                 const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                                 const OptionalTensor& mask, int64_t ignore_index, std::string_view cp_layout,
                                 int64_t cp_size, int64_t cp_rank);

using GatherSignature = at::Tensor(const at::Tensor& source, const at::Tensor& cu_seqlens,
                                   const OptionalTensor& group_ids, c10::SymInt num_tokens, const OptionalTensor& mask,
                                   int64_t ignore_index, std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                   OptionalDtype dtype);

using ValidateSignature = void(const at::Tensor& cu_seqlens, const OptionalTensor& group_ids, c10::SymInt num_groups,
                               c10::SymInt num_tokens, std::string_view cp_layout, int64_t cp_size, int64_t cp_rank);

ReduceSignature segment_scatter_reduce;
AccumulateSignature segment_scatter_accumulate_;
GatherSignature segment_gather;

}  // namespace segscatter
