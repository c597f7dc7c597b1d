# SPDX-License-Identifier: Apache-2.0
"""The same figures computed the plain way, to compare values and time with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from packing import PackedRow
from torch import Tensor

MAX_RELATIVE_DIFFERENCE = 5e-6  # the loop adds a document's losses up in float32, the tracker in float64


class DocumentLoop:
    """Sum and count of every channel, by a Python loop over the documents."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.documents = 0

    def update(self, losses: Tensor, row: PackedRow) -> None:
        offsets = row.cu_seqlens.tolist()
        for channel, begin, end in zip(row.channels, offsets[:-1], offsets[1:], strict=True):
            live = losses[begin:end][row.loss_mask[begin:end]]
            self.sums[channel] = self.sums.get(channel, 0.0) + live.sum().item()
            self.counts[channel] = self.counts.get(channel, 0) + live.numel()
        self.documents += len(row.channels)

    def largest_difference(self, sums: Mapping[str, float]) -> float:
        """The largest relative difference between ``sums`` and this loop's, over the loop's channels."""
        return max(abs(sums[channel] - expected) / abs(expected) for channel, expected in self.sums.items())


class Stopwatch:
    """Adds up the time spent in ``with stopwatch.lap():`` blocks."""

    def __init__(self) -> None:
        self.laps: list[float] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.laps.append(time.perf_counter() - start)

    @property
    def total(self) -> float:
        return sum(self.laps)

    @property
    def median(self) -> float:
        return sorted(self.laps)[len(self.laps) // 2]
