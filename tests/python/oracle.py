# SPDX-License-Identifier: Apache-2.0
"""The contract in plain Python: one token after the other, exact sums, no torch arithmetic and no offset map."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch


@dataclass
class Problem:
    """One call: what is passed to the operators, as tensors."""

    values: torch.Tensor
    cu_seqlens: torch.Tensor
    group_ids: torch.Tensor | None
    num_groups: int
    kwargs: dict = field(default_factory=dict)


def held_tokens(cu: list[int], num_tokens: int, layout: str = "none", size: int = 1, rank: int = 0) -> list[int]:
    """Global indices of the tokens that a rank holds, in order. ``num_tokens`` is how many it holds."""

    def two_pieces(begin: int, end: int) -> list[int]:
        piece = (end - begin) // (2 * size)
        first, second = begin + rank * piece, begin + (2 * size - 1 - rank) * piece
        return [*range(first, first + piece), *range(second, second + piece)]

    if layout == "per_document":
        held = [t for begin, end in itertools.pairwise(cu) for t in two_pieces(begin, end)]
        return held + [-1] * (num_tokens - len(held))  # padding behind the last document belongs to none
    if layout == "per_sequence":
        return two_pieces(0, num_tokens * size)
    return list(range(rank * num_tokens, (rank + 1) * num_tokens))


def token_groups(problem: Problem, num_tokens: int) -> list[int | None]:
    """The group of every local token; None for tokens that count nowhere."""
    cu = problem.cu_seqlens.tolist()
    ids = list(range(len(cu) - 1)) if problem.group_ids is None else problem.group_ids.tolist()
    cp = problem.kwargs.get("cp")
    tokens = held_tokens(cu, num_tokens, *((cp.layout, cp.size, cp.rank) if cp else ()))
    mask = problem.kwargs.get("mask")
    marks = [None] * num_tokens if mask is None else mask.reshape(-1).tolist()
    ignore = problem.kwargs.get("ignore_index", 0)
    documents = list(zip(cu[:-1], cu[1:], ids, strict=True))
    groups: list[int | None] = []
    for token, mark in zip(tokens, marks, strict=True):
        live = mask is None or mark != ignore
        ids_here = [g for begin, end, g in documents if begin <= token < end]
        group = ids_here[0] if live and ids_here else None
        groups.append(group if group is not None and 0 <= group < problem.num_groups else None)
    return groups


def exact_sum(values: list[float]) -> float:
    if any(math.isnan(v) for v in values) or {math.inf, -math.inf} <= set(values):
        return math.nan
    infinite = [v for v in values if math.isinf(v)]
    return infinite[0] if infinite else math.fsum(values)


def reduce(problem: Problem) -> tuple[list[list[float]], list[float], list[int]]:
    """Sums per row and group, the largest possible error scale (sum of magnitudes) per row and group, counts."""
    rows = problem.values.double().reshape(-1, problem.values.shape[-1]).tolist() if problem.values.numel() else []
    groups = token_groups(problem, problem.values.shape[-1])
    members: list[list[int]] = [[] for _ in range(problem.num_groups)]
    for t, group in enumerate(groups):
        if group is not None:
            members[group].append(t)
    num_rows = problem.values.shape[0] if problem.values.dim() == 2 else 1
    rows = rows or [[] for _ in range(num_rows)]
    sums = [[exact_sum([row[t] for t in tokens]) for tokens in members] for row in rows]
    scale = [[math.fsum(abs(row[t]) for t in tokens if math.isfinite(row[t])) for tokens in members] for row in rows]
    return sums, scale, [len(tokens) for tokens in members]


def check_reduce(problem: Problem, sums: torch.Tensor, counts: torch.Tensor) -> None:
    """Counts are equal; sums are as good as float64 accumulation rounded once to their dtype."""
    want, scale, want_counts = reduce(problem)
    assert counts.tolist() == want_counts
    assert counts.dtype == torch.int64
    assert sums.shape == (*problem.values.shape[:-1], problem.num_groups)
    rounding = 2.0**-24 if sums.dtype == torch.float32 else 2.0**-53
    got = sums.double().reshape(len(want), problem.num_groups).tolist()
    for got_row, want_row, scale_row in zip(got, want, scale, strict=True):
        for g, w, s in zip(got_row, want_row, scale_row, strict=True):
            if math.isfinite(w):
                assert abs(g - w) <= rounding * abs(w) + 4e-13 * s, (g, w, s)
            else:
                assert g == w or (math.isnan(g) and math.isnan(w)), (g, w)


def gather(source: torch.Tensor, problem: Problem, num_tokens: int) -> torch.Tensor:
    """``[K, T]`` or ``[T]`` in the dtype of ``source``."""
    groups = token_groups(problem, num_tokens)
    rows = source.reshape(-1, source.shape[-1]).tolist()
    out = [[row[g] if g is not None else 0.0 for g in groups] for row in rows]
    return torch.tensor(out, dtype=source.dtype).reshape(*source.shape[:-1], num_tokens)
