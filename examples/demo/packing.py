# SPDX-License-Identifier: Apache-2.0
"""Documents packed into rows, in the form that variable-length attention kernels take: one row and ``cu_seqlens``."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Document(NamedTuple):
    channel: str
    text: bytes


@dataclass(frozen=True)
class PackedRow:
    """One training step's input: S documents in a row of T tokens.

    tokens: ``[T]`` int64, bytes; 0 behind the last document.
    cu_seqlens: ``[S + 1]`` int32; document d is ``tokens[cu_seqlens[d]:cu_seqlens[d + 1]]``. Ends before T when the
        row's tail is padding.
    channels: S names.
    loss_mask: ``[T]`` bool; False for a document's first token, which nothing predicts, and for padding.
    """

    tokens: Tensor
    cu_seqlens: Tensor
    channels: list[str]
    loss_mask: Tensor

    @classmethod
    def of(cls, documents: list[Document], row_length: int) -> PackedRow:
        lengths = torch.tensor([len(document.text) for document in documents])
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        end = int(cu_seqlens[-1])
        text = bytearray(b"".join(document.text for document in documents))
        tokens = torch.zeros(row_length, dtype=torch.int64)
        tokens[:end] = torch.frombuffer(text, dtype=torch.uint8)
        loss_mask = torch.arange(row_length) < end
        loss_mask[cu_seqlens[:-1]] = False
        return cls(tokens, cu_seqlens.int(), [document.channel for document in documents], loss_mask)


def mix(documents: Mapping[str, list[bytes]], weights: Mapping[str, float], seed: int) -> Iterator[Document]:
    """Draws documents for ever: a channel by ``weights``, then its next document, in a new order each time round."""
    rng = random.Random(seed)

    def shuffled(texts: list[bytes]) -> Iterator[bytes]:
        while True:
            yield from rng.sample(texts, len(texts))

    streams = {channel: shuffled(texts) for channel, texts in documents.items()}
    while True:
        [channel] = rng.choices(list(streams), [weights[channel] for channel in streams])
        yield Document(channel, next(streams[channel]))


def pack(documents: Iterator[Document], row_length: int) -> Iterator[PackedRow]:
    """Fills rows in the order given. A document that no longer fits opens the next row; what is left is padding.

    Raises ValueError for a document that is empty or longer than a row.
    """
    row: list[Document] = []
    used = 0
    for document in documents:
        length = len(document.text)
        if not 0 < length <= row_length:
            raise ValueError(f"a document must have 1 to {row_length} bytes, but one has {length}")
        if used + length > row_length:
            yield PackedRow.of(row, row_length)
            row, used = [], 0
        row.append(document)
        used += length
    if row:
        yield PackedRow.of(row, row_length)
