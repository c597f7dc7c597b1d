# SPDX-License-Identifier: Apache-2.0
"""segscatter, and the ways that torch alone offers: those of ``segscatter.reference`` and two variants."""

from __future__ import annotations

import functools
from collections.abc import Callable

import segscatter
import torch
from segscatter import reference
from torch import Tensor

from .cases import Case
from .methods import Call, SkippedError

MAX_LOOP_DOCUMENTS = 20_000


def by_row(case: Case, function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Call:
    """A call of ``function(losses, mask)``, which takes one float32 row and a bool mask, as all baselines do.

    Labels are compared, narrower values widened (counts in bfloat16 would stop at 256) and rows taken one by one in
    every call, since users of these ways must do so too.
    """
    if case.losses.dim() == 1 and case.losses.dtype.itemsize >= 4:
        return lambda: function(case.losses, case.live())

    def call():
        mask = case.live()
        results = [function(row.float(), mask) for row in case.losses.reshape(-1, case.num_tokens)]
        return torch.stack([sums for sums, _ in results]).view(*case.losses.shape[:-1], -1), results[0][1]

    return call


def ours(case: Case) -> Call:
    def call():
        return segscatter.segment_scatter_reduce(
            case.losses,
            case.cu_seqlens,
            case.group_ids,
            case.num_groups,
            mask=case.mask,
            ignore_index=case.ignore_index,
        )

    return call


def document_loop(case: Case) -> Call:
    if case.group_ids.numel() > MAX_LOOP_DOCUMENTS:
        raise SkippedError(f"more than {MAX_LOOP_DOCUMENTS} documents")
    names = case.names

    def function(losses, mask):
        totals = reference.baseline_document_loop(losses, case.cu_seqlens, names, mask)
        entries = [totals.get(name, (0.0, 0)) for name in case.vocabulary]
        return torch.tensor([s for s, _ in entries], dtype=torch.float64), torch.tensor([n for _, n in entries])

    return by_row(case, function)


def of_reference(function) -> Callable[[Case], Call]:
    """A way of ``segscatter.reference`` that takes ids as a tensor: int64, with which index_add_ is fastest."""

    def prepare(case: Case) -> Call:
        ids = case.group_ids.long()

        def one_row(losses, mask):
            result = function(losses, case.cu_seqlens, ids, case.num_groups, mask)
            return result if isinstance(result, tuple) else result.unbind(-1)

        return by_row(case, one_row)

    return prepare


repeat_interleave = of_reference(reference.baseline_repeat_interleave)


def repeat_interleave_names(case: Case) -> Call:
    names, vocabulary = case.names, case.vocabulary

    def function(losses, mask):
        args = losses, case.cu_seqlens, names, vocabulary, mask
        return reference.baseline_repeat_interleave_names(*args).unbind(-1)

    return by_row(case, function)


def deterministic(case: Case) -> Call:
    inner = repeat_interleave(case)

    def call():
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            return inner()
        finally:
            torch.use_deterministic_algorithms(before)

    return call


def compiled(case: Case) -> Call:
    ids, cu_seqlens = case.group_ids.long(), case.cu_seqlens.long()
    torch.compiler.reset()  # only so many shapes of one function are compiled

    # repeat_interleave has an output of unknown size, at which compilation would stop; searchsorted does the same.
    @functools.partial(torch.compile, fullgraph=True, dynamic=False)
    def vectorised(losses, cu_seqlens, ids, mask):
        position = torch.arange(losses.numel(), device=losses.device)
        token_ids = ids[torch.searchsorted(cu_seqlens, position, right=True) - 1]
        source = torch.stack([torch.where(mask, losses, 0.0), mask.to(losses.dtype)], dim=-1)
        return losses.new_zeros(case.num_groups, 2).index_add(0, token_ids, source)

    call = by_row(case, lambda losses, mask: vectorised(losses, cu_seqlens, ids, mask).unbind(-1))
    try:
        call()
    except Exception as error:
        raise SkippedError(f"torch.compile failed: {type(error).__name__}") from error
    return call
