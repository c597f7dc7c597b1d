# SPDX-License-Identifier: Apache-2.0
"""Plain-torch twins of the operators, and the ways that people compute the same without this library.

The twins take the operators' arguments and follow their contract (selection instead of multiplication, dropped
segments, context-parallel layouts); they are the oracle of tests and show what the fused kernels do. The ``baseline_``
functions are what benchmarks compare with: they are as their users write them, with their flaws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import ContextParallel

__all__ = [
    "baseline_bincount",
    "baseline_document_loop",
    "baseline_repeat_interleave",
    "baseline_repeat_interleave_names",
    "baseline_scatter_add",
    "baseline_segment_reduce",
    "live_tokens",
    "local_offsets",
    "segment_gather",
    "segment_scatter_accumulate_",
    "segment_scatter_reduce",
    "token_groups",
]


def local_offsets(cu_seqlens: Tensor, num_tokens: int, cp: ContextParallel | None = None) -> Tensor:
    """Maps global offsets to offsets among the ``num_tokens`` tokens held here; int64, same shape."""
    cp = cp or ContextParallel()
    x = cu_seqlens.long().clamp(min=0)

    def window(offset: int, length: int) -> Tensor:
        return (x - offset).clamp(0, length)

    if cp.layout == "per_document":
        return (x // cp.size).clamp(max=num_tokens)
    if cp.layout == "contiguous":
        return window(cp.rank * num_tokens, num_tokens)
    if cp.layout == "per_sequence":
        half = num_tokens // 2
        return window(cp.rank * half, half) + window((2 * cp.size - 1 - cp.rank) * half, num_tokens - half)
    return window(0, num_tokens)


def live_tokens(mask: Tensor, ignore_index: int = 0) -> Tensor:
    """``[T]`` bool: ``mask[t] != ignore_index``, compared as numbers (torch compares in the type of ``mask``)."""
    mask = mask.reshape(-1)
    if mask.is_floating_point():
        mask = mask.double()
        return (
            mask != ignore_index
            if int(float(ignore_index)) == ignore_index
            else torch.ones_like(mask, dtype=torch.bool)
        )
    return mask.long() != ignore_index


def token_groups(
    cu_seqlens: Tensor,
    group_ids: Tensor | None,
    num_groups: int,
    num_tokens: int,
    *,
    mask: Tensor | None = None,
    ignore_index: int = 0,
    cp: ContextParallel | None = None,
) -> Tensor:
    """``[T]`` int64: the group of every token; ``num_groups`` for dead tokens and tokens without a group."""
    offsets = local_offsets(cu_seqlens, num_tokens, cp)
    ids = torch.arange(num_groups, device=offsets.device) if group_ids is None else group_ids.long()
    ids = torch.where((ids >= 0) & (ids < num_groups), ids, num_groups)
    ids = torch.cat([ids.new_full((1,), num_groups), ids, ids.new_full((1,), num_groups)])  # before, inside, behind
    position = torch.arange(num_tokens, device=offsets.device)
    groups = ids[torch.searchsorted(offsets, position, right=True)]
    if mask is not None:
        groups = torch.where(live_tokens(mask, ignore_index), groups, num_groups)
    return groups


def segment_scatter_reduce(
    values: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor | None,
    num_groups: int,
    *,
    mask: Tensor | None = None,
    ignore_index: int = 0,
    cp: ContextParallel | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of :func:`segscatter.segment_scatter_reduce`, accumulating in float64."""
    groups = token_groups(
        cu_seqlens, group_ids, num_groups, values.shape[-1], mask=mask, ignore_index=ignore_index, cp=cp
    )
    dtype = dtype or (torch.float64 if values.dtype == torch.float64 else torch.float32)
    sums = values.new_zeros(*values.shape[:-1], num_groups + 1, dtype=torch.float64)
    sums = sums.index_add(-1, groups, values.double())  # dead values land in the last entry, which is cut off
    counts = torch.bincount(groups, minlength=num_groups + 1)
    return sums[..., :num_groups].to(dtype), counts[:num_groups]


def segment_scatter_accumulate_(sums: Tensor, counts: Tensor, values: Tensor, *args, **kwargs) -> None:
    """Twin of :func:`segscatter.segment_scatter_accumulate_`."""
    more, n = segment_scatter_reduce(values, *args, sums.shape[-1], dtype=torch.float64, **kwargs)
    sums.copy_(sums.double() + more)
    counts.add_(n)


def segment_gather(
    source: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor | None,
    num_tokens: int,
    *,
    mask: Tensor | None = None,
    ignore_index: int = 0,
    cp: ContextParallel | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Twin of :func:`segscatter.segment_gather`."""
    num_groups = source.shape[-1]
    groups = token_groups(cu_seqlens, group_ids, num_groups, num_tokens, mask=mask, ignore_index=ignore_index, cp=cp)
    padded = torch.cat([source, source.new_zeros(*source.shape[:-1], 1)], dim=-1)
    return padded[..., groups].to(dtype or source.dtype)


def baseline_document_loop(losses: Tensor, cu_seqlens: Tensor, channels: list[str], mask: Tensor) -> dict[str, list]:
    """Per-document loop, as trainers wrote it first: three device syncs for each document. Returns [sum, count]s."""
    totals: dict[str, list] = {}
    for d, channel in enumerate(channels):
        begin, end = int(cu_seqlens[d]), int(cu_seqlens[d + 1])
        live = losses[begin:end][mask[begin:end]]
        entry = totals.setdefault(channel, [0.0, 0])
        entry[0] += live.sum().item()
        entry[1] += live.numel()
    return totals


def baseline_repeat_interleave(
    losses: Tensor, cu_seqlens: Tensor, group_ids: Tensor, num_groups: int, mask: Tensor
) -> Tensor:
    """``repeat_interleave`` + ``index_add_``, as trainers write it today. Returns ``[G, 2]`` float32 sums and counts.

    NaN leaks through ``losses * mask``, and float32 counts stop at 2^24.
    """
    token_ids = group_ids.repeat_interleave(cu_seqlens.diff())
    mask = mask.to(losses.dtype)
    source = torch.stack([losses * mask, mask], dim=-1)
    return losses.new_zeros(num_groups, 2).index_add_(0, token_ids, source)


def baseline_repeat_interleave_names(
    losses: Tensor, cu_seqlens: Tensor, channels: list[str], vocabulary: dict[str, int], mask: Tensor
) -> Tensor:
    """:func:`baseline_repeat_interleave` from channel names, looked up one by one in every step."""
    group_ids = torch.tensor([vocabulary[channel] for channel in channels], device=losses.device)
    return baseline_repeat_interleave(losses, cu_seqlens, group_ids, len(vocabulary), mask)


def baseline_scatter_add(
    losses: Tensor, cu_seqlens: Tensor, group_ids: Tensor, num_groups: int, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """``repeat_interleave`` + two ``scatter_add_``. Returns float32 sums and counts, with the flaws of float32."""
    token_ids = group_ids.long().repeat_interleave(cu_seqlens.diff())
    mask = mask.to(losses.dtype)
    sums = losses.new_zeros(num_groups).scatter_add_(0, token_ids, losses * mask)
    return sums, losses.new_zeros(num_groups).scatter_add_(0, token_ids, mask)


def baseline_bincount(
    losses: Tensor, cu_seqlens: Tensor, group_ids: Tensor, num_groups: int, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """repeat_interleave, the live tokens picked out, bincount with weights and without: a sync for each on a GPU."""
    token_ids = group_ids.long().repeat_interleave(cu_seqlens.diff())[mask]
    sums = torch.bincount(token_ids, weights=losses[mask], minlength=num_groups)
    return sums, torch.bincount(token_ids, minlength=num_groups)


def baseline_segment_reduce(
    losses: Tensor, cu_seqlens: Tensor, group_ids: Tensor, num_groups: int, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """``torch.segment_reduce`` of losses and mask to documents, then ``index_add_`` to groups; float32."""
    mask = mask.to(losses.dtype)
    offsets = cu_seqlens.long()
    sums = torch.segment_reduce(losses * mask, "sum", offsets=offsets, initial=0, unsafe=True)
    counts = torch.segment_reduce(mask, "sum", offsets=offsets, initial=0, unsafe=True)
    total = losses.new_zeros(num_groups)
    return total.index_add(0, group_ids, sums), total.index_add(0, group_ids, counts)
