// SPDX-License-Identifier: Apache-2.0
/// The operators for C++ programs with LibTorch:
///
///     auto [sums, counts] = segscatter::segment_scatter_reduce(
///         losses, cu_seqlens, channel_ids, num_channels, segscatter::Options().mask(labels).ignore_index(-100));
///
/// Calls go through torch's dispatcher, as from Python: with autograd, on the tensors' device and current stream, and
/// with the library's schemas as the only thing that both sides must agree on. Link segscatter::torch.
///
/// All functions throw c10::ValueError (shapes, sizes, devices) and c10::TypeError (dtypes), naming the argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

namespace segscatter {

/// Version of the library that was loaded.
__attribute__((visibility("default"))) const char* library_version();

namespace detail {
using OptionalTensor = std::optional<at::Tensor>;
using OptionalDtype = std::optional<at::ScalarType>;

// The operators' schemas as C++ types: arguments as in the functions below, then mask, ignore_index, cp_layout,
// cp_size, cp_rank, and dtype where there is one.
using ReduceSignature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                                           c10::SymInt, const OptionalTensor&, std::int64_t,
                                                           std::string_view, std::int64_t, std::int64_t, OptionalDtype);
using AccumulateSignature = void(at::Tensor&, at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                 const OptionalTensor&, std::int64_t, std::string_view, std::int64_t, std::int64_t);
using GatherSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, c10::SymInt,
                                   const OptionalTensor&, std::int64_t, std::string_view, std::int64_t, std::int64_t,
                                   OptionalDtype);

// Makes programs depend on the library whose operators they only name, so that linkers do not leave it out.
inline const char* const kLoadedVersion = library_version();

template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}
}  // namespace detail

/// Optional arguments, set one after the other.
class Options {
 public:
  /// T elements ([T] or [1, T]), bool, integer or float: token t is live iff mask[t] != ignore_index. Dead tokens are
  /// never used in arithmetic. Default: all are live.
  Options& mask(at::Tensor mask) {
    mask_ = std::move(mask);
    return *this;
  }
  /// Default: 0, for loss masks. For labels as the mask: -100.
  Options& ignore_index(std::int64_t index) {
    ignore_index_ = index;
    return *this;
  }
  /// Which part of the global row the values are: "none", "per_document", "per_sequence" or "contiguous" (see core.h).
  /// cu_seqlens are then offsets in the global row.
  Options& context_parallel(std::string layout, std::int64_t size, std::int64_t rank) {
    cp_layout_ = std::move(layout);
    cp_size_ = size;
    cp_rank_ = rank;
    return *this;
  }
  /// Of the sums: kFloat or kDouble (default: kDouble for kDouble values, else kFloat). Of segment_gather's result: any
  /// floating dtype (default: that of the source). segment_scatter_accumulate_ ignores it: the sums have their own.
  Options& dtype(at::ScalarType type) {
    dtype_ = type;
    return *this;
  }

  const std::optional<at::Tensor>& mask() const { return mask_; }
  std::int64_t ignore_index() const { return ignore_index_; }
  const std::string& cp_layout() const { return cp_layout_; }
  std::int64_t cp_size() const { return cp_size_; }
  std::int64_t cp_rank() const { return cp_rank_; }
  std::optional<at::ScalarType> dtype() const { return dtype_; }

 private:
  std::optional<at::Tensor> mask_;
  std::int64_t ignore_index_ = 0;
  std::string cp_layout_ = "none";
  std::int64_t cp_size_ = 1, cp_rank_ = 0;
  std::optional<at::ScalarType> dtype_;
};

/// Sums and counts of the live tokens of every group, in one pass.
///
/// values      [T] or [K, T]; kHalf, kBFloat16, kFloat or kDouble; any strides
/// cu_seqlens  [S + 1], kInt or kLong, non-decreasing. Tokens outside [cu_seqlens[0], cu_seqlens[S]) are dropped
/// group_ids   [S], kInt or kLong; none: segment d is group d, and num_groups must be S. A segment with an id outside
///             [0, num_groups) is dropped
/// Returns sums ([G] or [K, G], as good as float64 accumulation rounded once, the same bits every time; differentiable
/// in values) and counts ([G], kLong).
inline std::tuple<at::Tensor, at::Tensor> segment_scatter_reduce(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                                                 const std::optional<at::Tensor>& group_ids,
                                                                 std::int64_t num_groups,
                                                                 const Options& options = Options()) {
  static const auto op = detail::find_operator<detail::ReduceSignature>("segscatter::segment_scatter_reduce");
  return op.call(values, cu_seqlens, group_ids, num_groups, options.mask(), options.ignore_index(), options.cp_layout(),
                 options.cp_size(), options.cp_rank(), options.dtype());
}

/// Adds what segment_scatter_reduce would return to sums ([G] or [K, G], kFloat or kDouble) and counts ([G], kLong),
/// both contiguous. The number of groups is that of sums.
inline void segment_scatter_accumulate_(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values,
                                        const at::Tensor& cu_seqlens, const std::optional<at::Tensor>& group_ids,
                                        const Options& options = Options()) {
  static const auto op = detail::find_operator<detail::AccumulateSignature>("segscatter::segment_scatter_accumulate_");
  op.call(sums, counts, values, cu_seqlens, group_ids, options.mask(), options.ignore_index(), options.cp_layout(),
          options.cp_size(), options.cp_rank());
}

/// The adjoint: every live token gets its group's entry of source ([G] or [K, G]), all others exactly 0.
/// Returns [num_tokens] or [K, num_tokens]; differentiable in source.
inline at::Tensor segment_gather(const at::Tensor& source, const at::Tensor& cu_seqlens,
                                 const std::optional<at::Tensor>& group_ids, std::int64_t num_tokens,
                                 const Options& options = Options()) {
  static const auto op = detail::find_operator<detail::GatherSignature>("segscatter::segment_gather");
  return op.call(source, cu_seqlens, group_ids, num_tokens, options.mask(), options.ignore_index(), options.cp_layout(),
                 options.cp_size(), options.cp_rank(), options.dtype());
}

}  // namespace segscatter
