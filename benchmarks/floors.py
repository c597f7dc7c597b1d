# SPDX-License-Identifier: Apache-2.0
"""What no method can beat, or only just: parts of the work, or none of it."""

from __future__ import annotations

import segscatter
import torch

from . import native
from .cases import Case
from .methods import Call, SkippedError


def sum_of_losses(case: Case) -> Call:
    return case.losses.sum


def where_sum(case: Case) -> Call:
    return lambda: torch.where(case.live(), case.losses, 0).sum()


def nothing(case: Case) -> Call:
    """An operator that returns at once, with the arguments that segscatter's wrapper passes on: torch's part alone."""
    operator = native.operators().nothing.default
    options = {"mask": case.mask}
    if case.ignore_index:
        options["ignore_index"] = case.ignore_index

    def call():
        operator(case.losses, case.cu_seqlens, case.group_ids, case.num_groups, **options)

    return call


def without_tokens(case: Case) -> Call:
    """segscatter with no tokens: the fixed cost of its wrapper, checks and outputs."""
    losses, mask = case.losses[..., :0], case.mask[:0]
    cu_seqlens, ids = case.cu_seqlens[:1], case.group_ids[:0]

    def call():
        segscatter.segment_scatter_reduce(
            losses, cu_seqlens, ids, case.num_groups, mask=mask, ignore_index=case.ignore_index
        )

    return call


def read(case: Case) -> Call:
    """A C++ loop over all bytes of the arguments, with torch's threads."""
    if case.device != "cpu":
        raise SkippedError("reads host memory")
    read_bytes = native.read_bytes()
    tensors = case.losses, case.mask, case.cu_seqlens, case.group_ids
    spans = [(t.data_ptr(), t.numel() * t.element_size()) for t in tensors]

    def call():
        for address, size in spans:
            read_bytes(address, size)

    return call


def empty_kernel(case: Case) -> Call:
    if case.device != "cuda":
        raise SkippedError("needs a GPU")
    return native.cuda_operators().empty_kernel.default


def copy(case: Case) -> Call:
    if case.device != "cuda":
        raise SkippedError("needs a GPU")
    target = torch.empty_like(case.losses)
    return lambda: target.copy_(case.losses)
