# SPDX-License-Identifier: Apache-2.0
"""Random micro-batches of documents, and what their channel losses are by a plain loop over tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch

CHANNELS = ["code", "math", "web", "数学", "a b", None]


@dataclass
class Document:
    channel: object
    losses: list[float]  # exact in float32
    live: list[bool]


@dataclass
class MicroBatch:
    """documents, and tail: padding tokens behind them (packed batches only)."""

    documents: list[Document]
    tail: int = 0
    named: bool = True  # False: the batch has no channel column at all


@dataclass
class Totals:
    """Exact sums and counts of live tokens by channel."""

    sums: dict[object, Fraction] = field(default_factory=dict)
    counts: dict[object, int] = field(default_factory=dict)

    def add(self, micro_batches: Iterable[MicroBatch]) -> Totals:
        for micro_batch in micro_batches:
            for document in micro_batch.documents:
                channel = document.channel if micro_batch.named else None
                for loss, live in zip(document.losses, document.live, strict=True):
                    if live:
                        self.sums[channel] = self.sums.get(channel, Fraction(0)) + Fraction(loss)
                        self.counts[channel] = self.counts.get(channel, 0) + 1
        return self

    def means(self, prefix: str = "loss_") -> dict[str, float]:
        return {f"{prefix}{channel}": float(self.sums[channel] / count) for channel, count in self.counts.items()}


def draw_micro_batch(rng: random.Random, *, multiple: int = 1, tail_multiple: int = 0) -> MicroBatch:
    """multiple: of which every document's length is one. tail_multiple: that of the padding; 0: no padding."""
    channels = rng.sample(CHANNELS, rng.randint(1, len(CHANNELS)))
    documents = []
    for _ in range(rng.randint(1, 7)):
        length = multiple * math.ceil(rng.randint(1, 12) / multiple)
        losses = [
            float(torch.tensor(rng.choice([rng.random(), rng.expovariate(0.3), 0.0])).float()) for _ in range(length)
        ]
        density = rng.choice([0.0, 0.3, 0.8, 1.0])
        documents.append(Document(rng.choice(channels), losses, [rng.random() < density for _ in range(length)]))
    tail = tail_multiple * rng.randint(0, 3)
    return MicroBatch(documents, tail, named=rng.random() < 0.9)


def loss_table(micro_batches: Iterable[MicroBatch]) -> list[float]:
    """The losses of all tokens, documents one after the other, and a large one for padding."""
    return [x for b in micro_batches for d in b.documents for x in d.losses] + [1e6]


def packed_inputs(micro_batch: MicroBatch, first_id: int, padding_id: int, period: int) -> dict[str, Any]:
    """One row, as the trainers' collator lays it out. Position ids of the padding begin anew every ``period``."""
    ids, live, positions = [], [], []
    for document in micro_batch.documents:
        positions += range(len(document.losses))
        live += document.live
    ids = [*range(first_id, first_id + len(live)), *[padding_id] * micro_batch.tail]
    live += [False] * micro_batch.tail
    positions += [t % period for t in range(micro_batch.tail)]
    return _inputs(micro_batch, [ids], [live], [positions])


def row_inputs(micro_batch: MicroBatch, first_id: int, padding_id: int, multiple: int) -> dict[str, Any]:
    """One row a document, padded on the right to a common length, a multiple of ``multiple``."""
    longest = max(len(d.losses) for d in micro_batch.documents)
    width = multiple * math.ceil(longest / multiple)
    ids, live = [], []
    for document in micro_batch.documents:
        length = len(document.losses)
        ids.append([*range(first_id, first_id + length), *[padding_id] * (width - length)])
        live.append([*document.live, *[False] * (width - length)])
        first_id += length
    return _inputs(micro_batch, ids, live, [list(range(width))] * len(ids))


def _inputs(micro_batch: MicroBatch, ids: list, live: list, positions: list) -> dict[str, Any]:
    labels = torch.tensor([[7 if x else -100 for x in row] for row in live])
    inputs = {
        "input_ids": torch.tensor(ids),
        "labels": labels.roll(1, dims=-1),  # the trainers shift them by one to the left
        "position_ids": torch.tensor(positions),
        "seq_lens": [len(d.losses) for d in micro_batch.documents],
    }
    channels = [d.channel for d in micro_batch.documents]
    if micro_batch.named and any(channels):
        inputs["channel"] = channels
    else:
        micro_batch.named = False
    return inputs
