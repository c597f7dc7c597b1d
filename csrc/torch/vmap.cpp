// SPDX-License-Identifier: Apache-2.0
// torch.vmap. Where only values (or sources) are batched, the batch becomes more rows of one call; where other
// arguments are batched too, every element of the batch is a call. In place, every element adds to its own sums and
// counts.
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/stack.h>
#include <torch/library.h>

#include <algorithm>
#include <initializer_list>

#include "ops.h"

namespace segscatter {
namespace {

/// The innermost vmap among those that the tensors of a call belong to. While it lives, calls of operators concern the
/// vmaps around it.
class Level {
 public:
  explicit Level(std::initializer_list<const at::Tensor*> tensors) : below_(c10::DispatchKey::FuncTorchBatched) {
    for (const at::Tensor* tensor : tensors) {
      if (const auto* batched = tensor ? at::functorch::maybeGetBatchedImpl(*tensor) : nullptr) {
        id_ = std::max(id_, batched->level());
      }
    }
  }
  int64_t id() const { return id_; }
  at::Tensor wrap(const at::Tensor& tensor) const { return at::functorch::makeBatched(tensor, 0, id_); }

 private:
  const c10::impl::ExcludeDispatchKeyGuard below_;
  int64_t id_ = -1;
};

const at::Tensor* pointer(const OptionalTensor& tensor) {
  return tensor ? &*tensor : nullptr;
}

/// An argument as the level sees it: the tensor, and which of its dimensions is the batch, if any.
struct Argument {
  at::Tensor tensor;
  std::optional<int64_t> batch;

  Argument(const Level& level, const at::Tensor* given) {
    if (!given) return;
    const auto* batched = at::functorch::maybeGetBatchedImpl(*given);
    const bool here = batched && batched->level() == level.id();
    tensor = here ? batched->value() : *given;
    if (here) batch = batched->bdim();
  }
  at::Tensor element(int64_t i) const { return batch ? tensor.select(*batch, i) : tensor; }
};

/// The arguments of one call.
struct Call {
  Argument rows, cu_seqlens, group_ids, mask;

  Call(const Level& level, const at::Tensor& rows_, const at::Tensor& cu_seqlens_, const OptionalTensor& group_ids_,
       const OptionalTensor& mask_)
      : rows(level, &rows_),
        cu_seqlens(level, &cu_seqlens_),
        group_ids(level, pointer(group_ids_)),
        mask(level, pointer(mask_)) {}

  /// Whether the batch can become rows: of [T] or [K, T]. Other shapes are for the operator to refuse.
  bool one_call() const {
    return !cu_seqlens.batch && !group_ids.batch && !mask.batch && (rows.tensor.dim() == 2 || rows.tensor.dim() == 3);
  }
  int64_t batch_size() const {
    for (const Argument* argument : {&rows, &cu_seqlens, &group_ids, &mask}) {
      if (argument->batch) return argument->tensor.size(*argument->batch);
    }
    return 0;
  }

  /// [B, T] or [B, K, T] as [B * K, T].
  at::Tensor all_rows() const { return rows.tensor.movedim(*rows.batch, 0).flatten(0, -2); }
  /// What came of all_rows(), in its old shape.
  at::Tensor restore(const at::Tensor& result) const {
    if (rows.tensor.dim() == 2) return result;
    const c10::SymInt batch = rows.tensor.sym_size(*rows.batch);
    return result.unflatten_symint(0, {batch, rows.tensor.sym_size(*rows.batch == 0 ? 1 : 0)});
  }
};

OptionalTensor element(const OptionalTensor& given, const Argument& argument, int64_t i) {
  return given ? OptionalTensor(argument.element(i)) : std::nullopt;
}

std::tuple<at::Tensor, at::Tensor> reduce_batched(const at::Tensor& values, const at::Tensor& cu_seqlens,
                                                  const OptionalTensor& group_ids, c10::SymInt num_groups,
                                                  const OptionalTensor& mask, int64_t ignore_index,
                                                  std::string_view cp_layout, int64_t cp_size, int64_t cp_rank,
                                                  OptionalDtype dtype) {
  const Level level({&values, &cu_seqlens, pointer(group_ids), pointer(mask)});
  const Call call(level, values, cu_seqlens, group_ids, mask);
  const auto reduce = [&](const at::Tensor& rows, const at::Tensor& offsets, const OptionalTensor& ids,
                          const OptionalTensor& live) {
    return segment_scatter_reduce(rows, offsets, ids, num_groups, live, ignore_index, cp_layout, cp_size, cp_rank,
                                  dtype);
  };
  if (call.one_call()) {
    auto [sums, counts] = reduce(call.all_rows(), cu_seqlens, group_ids, mask);
    return {level.wrap(call.restore(sums)), std::move(counts)};
  }
  std::vector<at::Tensor> all_sums, all_counts;
  for (int64_t i = 0; i < call.batch_size(); ++i) {
    auto [sums, counts] = reduce(call.rows.element(i), call.cu_seqlens.element(i),
                                 element(group_ids, call.group_ids, i), element(mask, call.mask, i));
    all_sums.push_back(std::move(sums));
    all_counts.push_back(std::move(counts));
  }
  return {level.wrap(at::stack(all_sums)), level.wrap(at::stack(all_counts))};
}

void accumulate_batched(at::Tensor& sums, at::Tensor& counts, const at::Tensor& values, const at::Tensor& cu_seqlens,
                        const OptionalTensor& group_ids, const OptionalTensor& mask, int64_t ignore_index,
                        std::string_view cp_layout, int64_t cp_size, int64_t cp_rank) {
  const Level level({&sums, &counts, &values, &cu_seqlens, pointer(group_ids), pointer(mask)});
  const Call call(level, values, cu_seqlens, group_ids, mask);
  const Argument all_sums(level, &sums), all_counts(level, &counts);
  const char* without = all_sums.batch ? "counts has" : all_counts.batch ? "sums has" : "both have";
  TORCH_CHECK_VALUE(all_sums.batch && all_counts.batch,
                    "segment_scatter_accumulate_: inside torch.vmap, sums and counts must both have the batch "
                    "dimension, since every element adds to its own, but ",
                    without, " none; segment_scatter_reduce needs none");
  for (int64_t i = 0; i < all_sums.tensor.size(*all_sums.batch); ++i) {
    at::Tensor into = all_sums.element(i), number = all_counts.element(i);
    segment_scatter_accumulate_(into, number, call.rows.element(i), call.cu_seqlens.element(i),
                                element(group_ids, call.group_ids, i), element(mask, call.mask, i), ignore_index,
                                cp_layout, cp_size, cp_rank);
  }
}

at::Tensor gather_batched(const at::Tensor& source, const at::Tensor& cu_seqlens, const OptionalTensor& group_ids,
                          c10::SymInt num_tokens, const OptionalTensor& mask, int64_t ignore_index,
                          std::string_view cp_layout, int64_t cp_size, int64_t cp_rank, OptionalDtype dtype) {
  const Level level({&source, &cu_seqlens, pointer(group_ids), pointer(mask)});
  const Call call(level, source, cu_seqlens, group_ids, mask);
  const auto gather = [&](const at::Tensor& rows, const at::Tensor& offsets, const OptionalTensor& ids,
                          const OptionalTensor& live) {
    return segment_gather(rows, offsets, ids, num_tokens, live, ignore_index, cp_layout, cp_size, cp_rank, dtype);
  };
  if (call.one_call()) return level.wrap(call.restore(gather(call.all_rows(), cu_seqlens, group_ids, mask)));
  std::vector<at::Tensor> all;
  for (int64_t i = 0; i < call.batch_size(); ++i) {
    all.push_back(gather(call.rows.element(i), call.cu_seqlens.element(i), element(group_ids, call.group_ids, i),
                         element(mask, call.mask, i)));
  }
  return level.wrap(at::stack(all));
}

}  // namespace
}  // namespace segscatter

TORCH_LIBRARY_IMPL(segscatter, FuncTorchBatched, m) {
  m.impl("segment_scatter_reduce", segscatter::reduce_batched);
  m.impl("segment_scatter_accumulate_", segscatter::accumulate_batched);
  m.impl("segment_gather", segscatter::gather_batched);
}
