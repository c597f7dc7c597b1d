# SPDX-License-Identifier: Apache-2.0
"""Sixteen processes on one machine: different names, numbers of micro-batches and amounts of data on every rank."""

from __future__ import annotations

import random
from typing import Any

import pytest

WORLD_SIZE = 16
NAMES = [f"channel {i}" for i in range(40)]


def draw(rank: int, interval: int) -> list[tuple[list[str], list[int], list[float], list[bool]]]:
    """Micro-batches (channels, lengths, losses, mask) of a rank. Rank 3 never has any, rank 5 only late ones."""
    rng = random.Random(f"{rank} {interval}")
    if rank == 3 or (rank == 5 and interval == 0):
        return []
    batches = []
    for _ in range(rng.randint(0, 4)):
        names = rng.sample(NAMES[: 10 * (interval + 1)], 3)  # some names come up later
        channels = [rng.choice(names) for _ in range(rng.randint(1, 6))]
        lengths = [rng.randint(0, 9) for _ in channels]
        tokens = sum(lengths)
        batches.append(
            (channels, lengths, [rng.random() for _ in range(tokens)], [rng.random() < 0.7 for _ in range(tokens)])
        )
    return batches


def run(grow: bool) -> list[dict[str, Any]]:
    import torch
    from harness.counting import count_stalls
    from segscatter import ChannelLossTracker, ChannelRegistry
    from segscatter.megatron import wrap_loss_func

    rank = torch.distributed.get_rank()
    tracker = ChannelLossTracker(ChannelRegistry(grow=True) if grow else ChannelRegistry(NAMES))
    intervals = []
    for interval in (0, 1, 1):  # no name is new in the last one
        for channels, lengths, losses, mask in draw(rank, interval):
            offsets = torch.tensor([0, *lengths]).cumsum(0)
            loss_func = wrap_loss_func(
                lambda out: (out.sum(), {}), tracker, channels, loss_mask=torch.tensor([mask]),
                packed_seq_params={"cu_seqlens_q": offsets},
            )  # fmt: skip
            loss_func(torch.tensor([losses]))
        with count_stalls() as counts:
            stats = tracker.reduce()
        intervals.append({"stats": stats, "collectives": counts.collectives})
    return intervals


@pytest.mark.parametrize("grow", [False, True], ids=["fixed", "growing"])
def test_sixteen_ranks(pools, grow):
    ranks = pools(WORLD_SIZE).run(run, grow)
    for i, interval in enumerate((0, 1, 1)):
        truth: dict[str, list] = {}
        for rank in range(WORLD_SIZE):
            for channels, lengths, losses, mask in draw(rank, interval):
                tokens = iter(zip(losses, mask, strict=True))
                for channel, length in zip(channels, lengths, strict=True):
                    total = truth.setdefault(channel, [0.0, 0])
                    for _ in range(length):
                        loss, live = next(tokens)
                        if live:
                            total[0] += loss
                            total[1] += 1
        stats = [rank[i]["stats"] for rank in ranks]
        assert all(s == stats[0] for s in stats)
        assert [list(s) for s in stats] == [list(stats[0])] * WORLD_SIZE  # one order
        assert {k: s.count for k, s in stats[0].items()} == {k: n for k, (_, n) in truth.items() if n}
        for name, stat in stats[0].items():
            assert stat.sum == pytest.approx(truth[name][0], rel=1e-6)
    steady = [rank[2]["collectives"] for rank in ranks]
    assert steady == [2 if grow else 1] * WORLD_SIZE
