# SPDX-License-Identifier: Apache-2.0
"""Inputs, and what the right answer is."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

SEED = 20240607


@dataclass
class Case:
    """One problem. ``losses`` is ``[T]`` or ``[K, T]``; ``mask`` is a loss mask (ignore 0) or labels (ignore -100)."""

    name: str
    losses: Tensor
    mask: Tensor
    cu_seqlens: Tensor
    group_ids: Tensor
    num_groups: int
    ignore_index: int = 0
    coordinates: dict[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.losses.shape[-1]

    @property
    def device(self) -> str:
        return self.losses.device.type

    def live(self) -> Tensor:
        """The mask as bool; made anew, as who has labels must, unless it is bool already."""
        return self.mask if self.mask.dtype == torch.bool else self.mask != self.ignore_index

    @property
    def names(self) -> list[str]:
        return [f"channel_{g}" for g in self.group_ids.tolist()]

    @property
    def vocabulary(self) -> dict[str, int]:
        return {f"channel_{g}": g for g in range(self.num_groups)}

    def tensors(self) -> list[Tensor]:
        return [self.losses, self.mask, self.cu_seqlens, self.group_ids]


def lengths_equal(rng, num_tokens: int, num_documents: int) -> np.ndarray:
    cuts = np.linspace(0, num_tokens, num_documents + 1).astype(np.int64)
    return np.diff(cuts)


def lengths_random(rng, num_tokens: int, num_documents: int) -> np.ndarray:
    """Uniform cuts: exponential lengths, some of them 0."""
    cuts = np.sort(rng.integers(0, num_tokens + 1, num_documents - 1))
    return np.diff(np.concatenate([[0], cuts, [num_tokens]]))


def lengths_zipf(rng, num_tokens: int, num_documents: int) -> np.ndarray:
    """Zipf (1.2) ranks, scaled to the row: a few long documents and many short ones."""
    weights = rng.permutation(1.0 / np.arange(1, num_documents + 1) ** 1.2)
    cuts = np.round(np.cumsum(weights) / weights.sum() * num_tokens).astype(np.int64)
    return np.diff(np.concatenate([[0], cuts]))


def lengths_log_normal(rng, num_tokens: int, num_documents: int) -> np.ndarray:
    """Log-normal (median 300, sigma 1.2, at most 8192) until the row is full, whatever ``num_documents``: like SFT."""
    lengths = np.clip(rng.lognormal(np.log(300), 1.2, num_tokens // 100), 1, 8192).astype(np.int64)
    ends = np.minimum(np.cumsum(lengths), num_tokens)
    return np.diff(np.concatenate([[0], ends[: np.searchsorted(ends, num_tokens) + 1]]))


def lengths_with_empties(rng, num_tokens: int, num_documents: int) -> np.ndarray:
    """``num_documents`` equal ones with 100000 empty ones in one place."""
    lengths = lengths_equal(rng, num_tokens, num_documents)
    return np.insert(lengths, num_documents // 2, np.zeros(100_000, dtype=np.int64))


def make_case(
    name: str,
    num_tokens: int,
    num_documents: int,
    *,
    device: str,
    density: float = 0.25,
    num_groups: int = 8,
    lengths=lengths_equal,
    ids: str = "random",
    dtype: torch.dtype = torch.float32,
    labels: bool = False,
    rows: int = 0,
) -> Case:
    """Random losses in [0, 2), of which ``density`` are live. ids: "random", or "alternating" (ABAB). rows: K, or 0."""
    rng = np.random.default_rng(SEED)
    cut = lengths(rng, num_tokens, num_documents)
    cu_seqlens = np.concatenate([[0], np.cumsum(cut)])
    count = len(cut)
    group_ids = np.arange(count) % 2 if ids == "alternating" else rng.integers(0, num_groups, count)
    live = torch.from_numpy(rng.random(num_tokens, dtype=np.float32) < density)
    mask = torch.where(live, torch.from_numpy(rng.integers(0, 32000, num_tokens)), -100) if labels else live
    shape = (rows, num_tokens) if rows else (num_tokens,)
    losses = torch.from_numpy(rng.random(shape, dtype=np.float32) * 2).to(dtype)
    return Case(
        name=name,
        losses=losses.to(device),
        mask=mask.to(device),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)).to(device),
        group_ids=torch.from_numpy(group_ids.astype(np.int32)).to(device),
        num_groups=num_groups,
        ignore_index=-100 if labels else 0,
        coordinates={"tokens": num_tokens, "documents": count, "density": density},
    )


@dataclass(frozen=True)
class Answer:
    """Sums and magnitudes (sums of absolute values) are float64, ``[G]`` or ``[K, G]``; counts ``[G]``."""

    sums: np.ndarray
    magnitudes: np.ndarray
    counts: np.ndarray


def right_answer(case: Case) -> Answer:
    """In float64, by numpy, sharing nothing with what is measured."""
    groups = np.repeat(case.group_ids.cpu().numpy(), np.diff(case.cu_seqlens.cpu().numpy()))
    live = case.mask.cpu().numpy() != case.ignore_index
    groups = groups[live]
    every_row = case.losses.cpu().reshape(-1, case.num_tokens)
    rows = [row[torch.from_numpy(live)].double().numpy() for row in every_row]
    shape = (*case.losses.shape[:-1], case.num_groups)

    def by_group(rows: list[np.ndarray]) -> np.ndarray:
        return np.stack([np.bincount(groups, weights=row, minlength=case.num_groups) for row in rows]).reshape(shape)

    magnitudes = by_group([np.abs(row) for row in rows])
    return Answer(by_group(rows), magnitudes, np.bincount(groups, minlength=case.num_groups))
