# SPDX-License-Identifier: Apache-2.0
"""The operators, as thin typed wrappers over ``torch.ops.segscatter``.

T tokens of packed documents lie in one row; ``cu_seqlens`` (``[S + 1]``) says where each of the S segments starts and
``group_ids`` (``[S]``) which of G groups (channels) it belongs to. Every check, kernel and derivative lives in C++.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ContextParallel", "segment_gather", "segment_scatter_accumulate_", "segment_scatter_reduce", "validate"]


@dataclass(frozen=True)
class ContextParallel:
    """Which part of the global row this rank holds; ``cu_seqlens`` are then offsets in the global row.

    layout: ``"none"`` (the whole row), ``"per_document"`` (Megatron THD, TransformerEngine: every document is cut into
        ``2 * size`` pieces, the rank holds pieces ``rank`` and ``2 * size - 1 - rank`` of each), ``"per_sequence"``
        (the same for the whole row), ``"contiguous"`` (the rank-th of ``size`` equal parts).
    size, rank: of the context-parallel group.

    Raises ValueError for an unknown layout, ``size < 1``, a rank outside ``[0, size)``, or ``layout="none"`` with
    ``size > 1``.
    """

    layout: str = "none"
    size: int = 1
    rank: int = 0

    LAYOUTS = ("none", "per_document", "per_sequence", "contiguous")

    def __post_init__(self) -> None:
        if self.layout not in self.LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(self.LAYOUTS)}, but is {self.layout!r}")
        if self.size < 1:
            raise ValueError(f"size must be at least 1, but is {self.size}")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must lie in [0, {self.size}), but is {self.rank}")
        if self.layout == "none" and self.size != 1:
            raise ValueError(f"layout 'none' means one rank, but size is {self.size}")


_WHOLE_ROW = ContextParallel()
_OPS = torch.ops.segscatter
_reduce = _OPS.segment_scatter_reduce.default
_accumulate = _OPS.segment_scatter_accumulate_.default
_gather = _OPS.segment_gather.default


def _options(
    mask: Tensor | None, ignore_index: int, cp: ContextParallel | None, dtype: torch.dtype | None = None
) -> dict[str, object]:
    """Keyword arguments of an operator that are not its defaults: torch takes 0.5 us to convert one."""
    options: dict[str, object] = {}
    if mask is not None:
        options["mask"] = mask
    if ignore_index != 0 or type(ignore_index) is not int:  # torch refuses other types
        options["ignore_index"] = ignore_index
    if cp is not None:
        options.update(cp_layout=cp.layout, cp_size=cp.size, cp_rank=cp.rank)
    if dtype is not None:
        options["dtype"] = dtype
    return options


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
    """Sums and counts of the live tokens of every group, in one pass.

    values: ``[T]`` or ``[K, T]`` (K rows share the pass); float16, bfloat16, float32 or float64; any strides.
    cu_seqlens: ``[S + 1]``, int32 or int64, non-decreasing; offsets in the global row when ``cp`` is given. Tokens
        outside ``[cu_seqlens[0], cu_seqlens[S])`` belong to no segment and are dropped.
    group_ids: ``[S]``, int32 or int64; None means that segment d is group d (then ``num_groups`` must be S). A segment
        with an id outside ``[0, num_groups)`` is dropped; -1 is the way to ignore one.
    num_groups: G.
    mask: T elements (``[T]`` or ``[1, T]``), bool, integer or float. Token t counts iff ``mask[t] != ignore_index``: a
        loss mask with the default 0, labels with ``ignore_index=-100``. None: all tokens count. Tokens that do not
        count are never used in arithmetic, so NaN there does no harm.
    cp: which part of the global row ``values`` holds.
    dtype: of the sums, float32 or float64. Default: float64 for float64 values, else float32.

    Returns ``sums`` (``[G]`` or ``[K, G]``) and ``counts`` (``[G]``, int64). Sums of 32-bit and narrower values are as
    good as float64 accumulation rounded once; the same inputs give the same bits every time. Differentiable in
    ``values``, any number of times.

    Raises ValueError (shapes, sizes, devices) and TypeError (dtypes), naming the argument.
    """
    return _reduce(values, cu_seqlens, group_ids, num_groups, **_options(mask, ignore_index, cp, dtype))


def segment_scatter_accumulate_(
    sums: Tensor,
    counts: Tensor,
    values: Tensor,
    cu_seqlens: Tensor,
    group_ids: Tensor | None,
    *,
    mask: Tensor | None = None,
    ignore_index: int = 0,
    cp: ContextParallel | None = None,
) -> None:
    """Adds what :func:`segment_scatter_reduce` would return to ``sums`` and ``counts``, in the same launch.

    sums: ``[G]`` or ``[K, G]``, float32 or float64, contiguous. counts: ``[G]``, int64, contiguous. The rest as in
    :func:`segment_scatter_reduce`.
    """
    _accumulate(sums, counts, values, cu_seqlens, group_ids, **_options(mask, ignore_index, cp))


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
    """The adjoint of :func:`segment_scatter_reduce`: every live token gets its group's entry of ``source``.

    source: ``[G]`` or ``[K, G]``, a floating dtype. num_tokens: T, tokens held here. dtype: of the result, by default
    that of ``source``. The rest as in :func:`segment_scatter_reduce`.

    Returns ``[T]`` or ``[K, T]``; exactly 0 where a token is dead or in no group. Differentiable in ``source``.
    """
    return _gather(source, cu_seqlens, group_ids, num_tokens, **_options(mask, ignore_index, cp, dtype))


@torch.compiler.disable
def validate(
    cu_seqlens: Tensor,
    group_ids: Tensor | None,
    num_groups: int,
    num_tokens: int,
    *,
    cp: ContextParallel | None = None,
) -> None:
    """Checks what the operators trust nobody to have checked: the contents of ``cu_seqlens`` and ``group_ids``.

    Offsets must not decrease, nor leave ``[0, T]`` (with ``cp``: the global row, of ``num_tokens * size`` tokens); ids
    must lie in ``[-1, num_groups)``; with the ``per_document`` layout every length must be a multiple of
    ``2 * size``. Reads device data, so it synchronises; ``torch.compile`` leaves it out of its graphs and runs it
    between them (with ``fullgraph=True``: an error). ``SEGSCATTER_VALIDATE=1`` makes every operator call do this.

    Raises ValueError with the first bad position and its values.
    """
    cp = cp or _WHOLE_ROW
    _OPS.validate.default(
        cu_seqlens, group_ids, num_groups, num_tokens, cp_layout=cp.layout, cp_size=cp.size, cp_rank=cp.rank
    )
