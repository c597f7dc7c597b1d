// SPDX-License-Identifier: Apache-2.0
// Derivatives. Reduce and gather are linear and each other's adjoint, so backward calls the other operator through the
// dispatcher (which makes it differentiable again), and forward mode calls the operator itself on the tangent.
//
// Nodes are written out, as torch's generated code does, instead of torch::autograd::Function: that class knows neither
// forward mode nor torch.func.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <mutex>
#include <string>
#include <type_traits>
#include <utility>

#include "ops.h"

namespace segscatter {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

/// torch 2.12 and older count references to nodes with std::shared_ptr, newer ones with c10::intrusive_ptr.
using NodePointer = std::decay_t<decltype(std::declval<const at::Tensor&>().grad_fn())>;

template <class N>
auto make_node() {
  if constexpr (std::is_same_v<NodePointer, std::shared_ptr<Node>>) {
    return std::shared_ptr<N>(new N(), [](auto* node) { deleteNode(node); });  // torch's, found by its argument
  } else {
    return c10::make_intrusive<N>();
  }
}

/// What all three operators keep for backward. Saved tensors make a later in-place change a version error.
class SavedGrouping {
 public:
  void save(const at::Tensor& cu_seqlens, const OptionalTensor& group_ids, const OptionalTensor& mask,
            int64_t ignore_index, std::string_view cp_layout, int64_t cp_size, int64_t cp_rank) {
    cu_seqlens_ = SavedVariable(cu_seqlens, false);
    group_ids_ = SavedVariable(group_ids.value_or(at::Tensor()), false);
    mask_ = SavedVariable(mask.value_or(at::Tensor()), false);
    ignore_index_ = ignore_index;
    cp_layout_ = cp_layout;
    cp_size_ = cp_size;
    cp_rank_ = cp_rank;
  }
  void release() {
    cu_seqlens_.reset_data();
    group_ids_.reset_data();
    mask_.reset_data();
  }

  at::Tensor gather(const at::Tensor& source, const c10::SymInt& num_tokens, at::ScalarType dtype) const {
    return segment_gather(source, cu_seqlens_.unpack(), optional(group_ids_), num_tokens, optional(mask_),
                          ignore_index_, cp_layout_, cp_size_, cp_rank_, dtype);
  }
  at::Tensor reduce(const at::Tensor& values, const c10::SymInt& num_groups, at::ScalarType dtype) const {
    return std::get<0>(segment_scatter_reduce(values, cu_seqlens_.unpack(), optional(group_ids_), num_groups,
                                              optional(mask_), ignore_index_, cp_layout_, cp_size_, cp_rank_, dtype));
  }

 private:
  static OptionalTensor optional(const SavedVariable& saved) {
    at::Tensor tensor = saved.unpack();
    return tensor.defined() ? OptionalTensor(std::move(tensor)) : std::nullopt;
  }

  SavedVariable cu_seqlens_, group_ids_, mask_;
  int64_t ignore_index_ = 0;
  std::string cp_layout_;
  int64_t cp_size_ = 1, cp_rank_ = 0;
};

struct GroupingNode : Node {
  SavedGrouping grouping;
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    grouping.release();
  }
};

struct SegmentScatterReduceBackward : GroupingNode {
  c10::SymInt num_tokens;
  at::ScalarType dtype;

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined() || !task_should_compute_output(0)) return {at::Tensor()};
    return {grouping.gather(grads[0], num_tokens, dtype)};
  }
};

struct SegmentScatterAccumulateBackward : GroupingNode {
  c10::SymInt num_tokens;
  at::ScalarType dtype;

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return {at::Tensor(), at::Tensor()};
    at::Tensor grad_values;
    if (task_should_compute_output(1)) grad_values = grouping.gather(grads[0], num_tokens, dtype);
    return {grads[0], std::move(grad_values)};
  }
};

struct SegmentGatherBackward : GroupingNode {
  c10::SymInt num_groups;
  at::ScalarType dtype;

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined() || !task_should_compute_output(0)) return {at::Tensor()};
    const at::ScalarType sum_type = dtype == at::kDouble ? at::kDouble : at::kFloat;
    return {grouping.reduce(grads[0], num_groups, sum_type).to(dtype)};
  }
};

bool needs_grad(const at::Tensor& tensor) {
  return at::GradMode::is_enabled() && tensor.requires_grad();
}

at::Tensor tangent_of(const at::Tensor& tensor) {
  return tensor._fw_grad(/*level=*/0);
}

std::tuple<at::Tensor, at::Tensor> reduce_autograd(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                                   const OptionalTensor& group_ids, c10::SymInt num_groups,
                                                   const OptionalTensor& mask, int64_t ignore_index,
                                                   std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                                   OptionalDtype dtype) {
  const auto forward = [&](const at::Tensor& input, OptionalDtype sum_type) {
    return segment_scatter_reduce(input, cu_seqlens, group_ids, num_groups, mask, ignore_index, cp_layout, cp_size,
                                  cp_rank, sum_type);
  };
  auto [sums, counts] = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward(values, dtype);
  }();
  if (needs_grad(values)) {
    auto node = make_node<SegmentScatterReduceBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(values));
    node->grouping.save(cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank);
    node->num_tokens = values.sym_size(-1);
    node->dtype = values.scalar_type();
    torch::autograd::set_history(sums, node);
  }
  if (const at::Tensor tangent = tangent_of(values); tangent.defined()) {
    sums._set_fw_grad(std::get<0>(forward(tangent, sums.scalar_type())), /*level=*/0, /*is_inplace_op=*/false);
  }
  return {std::move(sums), std::move(counts)};
}

void accumulate_autograd(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values, const at::Tensor& cu_seqlens,
                         const OptionalTensor& group_ids, const OptionalTensor& mask, int64_t ignore_index,
                         std::string_view cp_layout, int64_t cp_size, int64_t cp_rank) {
  const bool any_grad = needs_grad(values) || needs_grad(sums);
  torch::autograd::check_inplace(sums, any_grad);
  const at::Tensor old_tangent = tangent_of(sums), tangent = tangent_of(values);
  {
    const at::AutoDispatchBelowAutograd below;  // ADInplaceOrView comes next and counts versions
    segment_scatter_accumulate_(sums, counts, values, cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size,
                                cp_rank);
  }
  if (any_grad) {
    auto node = make_node<SegmentScatterAccumulateBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(sums, values));
    node->grouping.save(cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank);
    node->num_tokens = values.sym_size(-1);
    node->dtype = values.scalar_type();
    torch::autograd::rebase_history(sums, node);
  }
  if (tangent.defined()) {
    const at::Tensor more =
        std::get<0>(segment_scatter_reduce(tangent, cu_seqlens, group_ids, sums.sym_size(-1), mask, ignore_index,
                                           cp_layout, cp_size, cp_rank, sums.scalar_type()));
    if (old_tangent.defined()) {
      old_tangent.add_(more);  // a tangent once set can only be changed in place
    } else {
      sums._set_fw_grad(more, /*level=*/0, /*is_inplace_op=*/true);
    }
  }
}

void accumulate_and_count_versions(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values,
                                   const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                                   const OptionalTensor& mask, int64_t ignore_index, std::string_view cp_layout,
                                   int64_t cp_size, int64_t cp_rank) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    segment_scatter_accumulate_(sums, counts, values, cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size,
                                cp_rank);
  }
  torch::autograd::increment_version(sums);
  torch::autograd::increment_version(counts);
}

at::Tensor gather_autograd(const at::Tensor& source, const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                           c10::SymInt num_tokens, const OptionalTensor& mask, int64_t ignore_index,
                           std::string_view cp_layout, int64_t cp_size, int64_t cp_rank, OptionalDtype dtype) {
  const auto forward = [&](const at::Tensor& input, OptionalDtype out_type) {
    return segment_gather(input, cu_seqlens, group_ids, num_tokens, mask, ignore_index, cp_layout, cp_size, cp_rank,
                          out_type);
  };
  at::Tensor out = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return forward(source, dtype);
  }();
  if (needs_grad(source)) {
    auto node = make_node<SegmentGatherBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(source));
    node->grouping.save(cu_seqlens, group_ids, mask, ignore_index, cp_layout, cp_size, cp_rank);
    node->num_groups = source.sym_size(-1);
    node->dtype = source.scalar_type();
    torch::autograd::set_history(out, node);
  }
  if (const at::Tensor tangent = tangent_of(source); tangent.defined()) {
    out._set_fw_grad(forward(tangent, out.scalar_type()), /*level=*/0, /*is_inplace_op=*/false);
  }
  return out;
}

}  // namespace
}  // namespace segscatter

TORCH_LIBRARY_IMPL(segscatter, Autograd, m) {
  m.impl("segment_scatter_reduce", segscatter::reduce_autograd);
  m.impl("segment_scatter_accumulate_", segscatter::accumulate_autograd);
  m.impl("segment_gather", segscatter::gather_autograd);
}

TORCH_LIBRARY_IMPL(segscatter, ADInplaceOrView, m) {
  m.impl("segment_scatter_accumulate_", segscatter::accumulate_and_count_versions);
}
