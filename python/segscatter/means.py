# SPDX-License-Identifier: Apache-2.0
"""Means over segments: what a per-sample loss needs, as one reduction with ``group_ids=None`` and a division."""

from __future__ import annotations

import torch
from torch import Tensor

from .ops import ContextParallel, segment_scatter_reduce

__all__ = ["segment_mean", "sum_of_segment_means"]


def segment_mean(
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int = 0,
    denominators: Tensor | None = None,
    empty: float = 0.0,
    cp: ContextParallel | None = None,
) -> Tensor:
    """The mean of each segment's live tokens.

    values: ``[T]`` or ``[K, T]`` (K rows share the pass); float16, bfloat16, float32 or float64.
    cu_seqlens: ``[S + 1]``, int32 or int64, non-decreasing; offsets in the global row when ``cp`` is given.
    mask, ignore_index: token t is live iff ``mask[t] != ignore_index``; None: all are. Dead tokens are never used in
        arithmetic, so NaN there does no harm, and their gradient is exactly 0.
    denominators: ``[S]``, integer or floating, on the device of ``values``: what to divide each sum by instead of the
        number of live tokens; clamped to at least 1. Samples of one rollout group may share theirs.
    empty: the result for a segment without a live token.
    cp: which part of the global row ``values`` holds. More than one rank needs ``denominators`` (the live tokens of
        all ranks), and the results of the ranks add up to the mean; so ``empty`` must be 0 then.

    Returns ``[S]`` or ``[K, S]``, float64 for float64 values, else float32. Differentiable any number of times, in
    forward and reverse mode.

    Raises ValueError (shapes, sizes, devices, a missing ``denominators``) and TypeError (dtypes), naming the argument.
    """
    if empty != 0.0 and _num_ranks(cp) > 1:
        raise ValueError(f"empty must be 0 where the results of {_num_ranks(cp)} ranks are added up, but is {empty}")
    sums, counts, denominators = _sums(values, cu_seqlens, mask, ignore_index, denominators, cp)
    means = divide(sums, denominators.clamp(min=1))
    return means if empty == 0.0 else torch.where(counts > 0, means, empty)


def sum_of_segment_means(
    values: Tensor,
    cu_seqlens: Tensor,
    *,
    mask: Tensor | None = None,
    ignore_index: int = 0,
    denominators: Tensor | None = None,
    cp: ContextParallel | None = None,
) -> Tensor:
    """The sum over segments of :func:`segment_mean`, where a segment without a live token adds nothing.

    Arguments as there. Returns a scalar, or ``[K]``.
    """
    sums, _, denominators = _sums(values, cu_seqlens, mask, ignore_index, denominators, cp)
    return divide(sums, denominators.clamp(min=1)).sum(-1)


def divide(sums: Tensor, divisors: Tensor) -> Tensor:
    """The quotient in the dtype of ``sums``, whatever that of ``divisors``."""
    return sums / (divisors.to(sums.dtype) if divisors.is_floating_point() else divisors)


def _num_ranks(cp: ContextParallel | None) -> int:
    return 1 if cp is None else cp.size


def _sums(
    values: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None,
    ignore_index: int,
    denominators: Tensor | None,
    cp: ContextParallel | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums and live tokens of the segments, and the given or counted denominators."""
    num_segments = max(cu_seqlens.numel() - 1, 0)  # the operator reports an empty cu_seqlens
    if denominators is not None:
        denominators = check_denominators(denominators, num_segments, values.device)
    elif _num_ranks(cp) > 1:
        raise ValueError(
            f"denominators must be given for {_num_ranks(cp)} context-parallel ranks: the live tokens of every segment "
            "on all ranks, of which this rank sees only its own"
        )
    sums, counts = segment_scatter_reduce(
        values, cu_seqlens, None, num_segments, mask=mask, ignore_index=ignore_index, cp=cp
    )
    return sums, counts, counts if denominators is None else denominators


def check_denominators(denominators: Tensor, num_segments: int, device: torch.device) -> Tensor:
    """``denominators`` if they are ``[S]`` real numbers on ``device``, else ValueError or TypeError."""
    if denominators.dtype == torch.bool or denominators.is_complex():
        raise TypeError(f"denominators must be integer or floating, but are {denominators.dtype}")
    if denominators.shape != (num_segments,):
        raise ValueError(
            f"denominators must have shape [S] = [{num_segments}], one for each segment, but have shape "
            f"{list(denominators.shape)}"
        )
    if denominators.device != device:
        raise ValueError(f"denominators are on {denominators.device}, but values are on {device}")
    return denominators
