# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of docs/scaling.md: ``python tests/clients/scaling.py``.

Bytes come from what torch.distributed really sends: the pickles of ``all_gather_object`` and the payload of the
tracker.
"""

from __future__ import annotations

import sys
import time
import tracemalloc
from types import SimpleNamespace
from unittest import mock

RANKS = (8, 64, 512, 4096, 16384)
CHANNELS = (8, 64)
MICRO_BATCHES = 80  # in a log interval: 10 steps of 8


def names(channels: int) -> list[str]:
    return [f"domain_{i:03d}" for i in range(channels)]


def pickle_bytes(channels: int) -> int:
    """What one rank contributes to upstream's gather of metric names: the object and the 8 bytes of its size."""
    import torch
    from torch.distributed.distributed_c10d import _object_to_tensor

    keys = [f"loss_{name}" for name in names(channels)]
    return _object_to_tensor(keys, torch.device("cpu"), None)[0].numel() + 8


def payload_bytes(channels: int) -> int:
    """What the tracker's one all-reduce carries, with a fixed vocabulary."""
    from segscatter import ChannelLossTracker, ChannelRegistry

    tracker = ChannelLossTracker(ChannelRegistry(names(channels)), device="cpu")
    tracker.reduce()
    payload = tracker._payload("train", 0)
    return payload.numel() * payload.element_size()


def traffic_table() -> str:
    """Calls and received bytes of a rank in a log interval."""
    rows = [
        "| ranks | channels | collectives | host reads | bytes received | collectives | host reads | bytes received |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for channels in CHANNELS:
        for ranks in RANKS:
            gathered = ranks * pickle_bytes(channels) + ring(8 * channels)
            upstream = f"{3 * MICRO_BATCHES} | {(3 * ranks + 1) * MICRO_BATCHES:,} | {human(gathered * MICRO_BATCHES)}"
            rows.append(f"| {ranks:,} | {channels} | {upstream} | 1 | 1 | {human(ring(payload_bytes(channels)))} |")
    return "\n".join(rows)


def ring(payload: int) -> int:
    """Bytes that a rank receives in an all-reduce, whatever the number of ranks."""
    return 2 * payload


def human(number: int) -> str:
    power = min((len(str(number)) - 1) // 3, 3)
    return f"{number / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def upstream_union(ranks: int, channels: int) -> tuple[float, int]:
    """Seconds and peak bytes for what a rank does with the gathered pickles in every micro-batch."""
    import torch
    from torch.distributed.distributed_c10d import _object_to_tensor, _tensor_to_object

    pickled, size = _object_to_tensor([f"loss_{name}" for name in names(channels)], torch.device("cpu"), None)
    return measure(lambda: sorted(set().union(*(_tensor_to_object(pickled, size, None) for _ in range(ranks)))))


def growing_merge(ranks: int, channels: int) -> tuple[float, int]:
    """The same for the tracker in a log that brings new names: all vocabularies are gathered and merged."""
    import torch
    from segscatter import ChannelRegistry
    from segscatter.distributed import SharedVocabulary

    registry = ChannelRegistry(names(channels), grow=True)
    with mock.patch("segscatter.distributed.dist", _EqualRanks(ranks)):
        return measure(lambda: SharedVocabulary(registry, 1).agree(_Group(), torch.device("cpu")))


class _Group:
    """Stands for a process group."""


class _EqualRanks:
    """torch.distributed among ranks of which all have the names of this one, in another order."""

    ReduceOp = SimpleNamespace(MAX=None)

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def get_world_size(self, group) -> int:
        return self._ranks

    def all_reduce(self, tensor, op=None, group=None) -> None:
        tensor[len(tensor) // 2 - 1] += 1  # the largest hash differs from the smallest

    def all_gather(self, outputs, tensor, group=None) -> None:
        for output in outputs:
            output.copy_(tensor)


def measure(function) -> tuple[float, int]:
    """CPU seconds, and bytes that Python allocated at the peak."""
    begin = time.process_time()
    function()
    seconds = time.process_time() - begin
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak


def host_table() -> str:
    rows = ["| ranks | channels | ms-swift, every micro-batch | tracker, a log with new names |", "|---|---|---|---|"]
    for channels in CHANNELS:
        for ranks in RANKS:
            cells = [
                f"{seconds * 1e3:.3g} ms, {human(peak)}"
                for seconds, peak in (upstream_union(ranks, channels), growing_merge(ranks, channels))
            ]
            rows.append(f"| {ranks:,} | {channels} | {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(traffic_table(), host_table(), sep="\n\n", file=sys.stdout)
