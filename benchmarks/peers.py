# SPDX-License-Identifier: Apache-2.0
"""Other libraries. None is required: who is missing is left out by name."""

from __future__ import annotations

import numpy as np
import torch

from . import native
from .baselines import by_row
from .cases import Case
from .methods import Call, SkippedError


def torch_scatter(case: Case) -> Call:
    try:
        from torch_scatter import segment_csr
    except (ImportError, OSError):
        raise SkippedError("torch_scatter is not installed") from None
    offsets, ids = case.cu_seqlens.long(), case.group_ids.long()

    def function(losses, mask):
        live = mask.to(losses.dtype)
        documents = segment_csr(torch.stack([losses * live, live]), offsets.expand(2, -1))
        total = documents.new_zeros(2, case.num_groups).index_add_(1, ids, documents)
        return total[0], total[1]

    return by_row(case, function)


def fbgemm(case: Case) -> Call:
    try:
        import fbgemm_gpu  # noqa: F401
    except (ImportError, OSError):
        raise SkippedError("fbgemm_gpu is not installed") from None
    ids, offsets = case.group_ids.long(), case.cu_seqlens
    segment_sum = torch.ops.fbgemm.segment_sum_csr

    def function(losses, mask):
        live = mask.to(losses.dtype)
        documents = torch.stack([segment_sum(1, offsets, losses * live), segment_sum(1, offsets, live)])
        total = documents.new_zeros(2, case.num_groups).index_add_(1, ids, documents)
        return total[0], total[1]

    return by_row(case, function)


def numpy_reduceat(case: Case) -> Call:
    if case.device != "cpu":
        raise SkippedError("numpy works on the CPU")
    offsets, ids = case.cu_seqlens.numpy(), case.group_ids.numpy()
    filled = np.flatnonzero(np.diff(offsets))  # of an empty document reduceat gives a token's value instead of 0
    starts, ids = offsets[filled], ids[filled]

    def function(losses, mask):
        losses, mask = losses.numpy(), mask.numpy()
        sums = np.add.reduceat(np.where(mask, losses, losses.dtype.type(0)), starts)
        counts = np.add.reduceat(mask.astype(np.int64), starts)
        group_counts = np.bincount(ids, weights=counts, minlength=case.num_groups)
        group_sums = np.bincount(ids, weights=sums, minlength=case.num_groups)
        return torch.from_numpy(group_sums), torch.from_numpy(group_counts)

    return by_row(case, function)


def cub(case: Case) -> Call:
    """cub::DeviceSegmentedReduce over a transform iterator: sums and counts of documents, then index_add_."""
    if case.device != "cuda":
        raise SkippedError("needs a GPU")
    if case.losses.dtype != torch.float32:
        raise SkippedError("built for float32")
    reduce_documents, ids = native.cuda_operators().segmented_reduce, case.group_ids.long()

    def function(losses, mask):
        documents = reduce_documents(losses, mask, case.cu_seqlens)
        return documents.new_zeros(case.num_groups, 2).index_add_(0, ids, documents).unbind(-1)

    return by_row(case, function)
