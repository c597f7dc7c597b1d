# SPDX-License-Identifier: Apache-2.0
"""Collectives and host reads, counted at the dispatcher, of ms-swift with and without the plugin."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from harness.batches import draw_micro_batch, loss_table, packed_inputs, row_inputs
from harness.counting import Counts

DOCUMENTS = 5
CHANNELS = ["code", "math", None, "code", "web"]


def micro_batch() -> Any:
    rng = random.Random(3)
    documents = [replace(draw_micro_batch(rng, multiple=2).documents[0], channel=c) for c in CHANNELS]
    for document in documents:
        document.live[:] = [True] * len(document.live)
    batch = draw_micro_batch(rng)
    return replace(batch, documents=documents, tail=0, named=True)


def count_megatron(packed: bool) -> dict[str, Counts]:
    """On a rank: the channel part of a micro-batch, and a log; upstream's and ours."""
    import torch
    from harness import upstream
    from harness.counting import count_stalls

    upstream.initialize_parallel()
    batch = micro_batch()
    losses = torch.tensor(loss_table([batch]))
    inputs = (packed_inputs if packed else row_inputs)(batch, 0, len(losses) - 1, 1)
    counted: dict[str, Counts] = {}
    for ours in (False, True):
        name = "ours" if ours else "upstream"
        trainer = upstream.megatron_trainer(losses, ours=ours, padding_free=packed)
        compute = trainer._compute_channel_loss

        def counting(*args: Any, compute=compute, name=name) -> Any:
            with count_stalls() as counts:
                result = compute(*args)
            counted[name] = counts
            return result

        trainer._compute_channel_loss = counting
        for _ in range(2):  # a first log compares the vocabularies
            metrics = upstream.forward_backward(trainer, [dict(inputs)])
            with count_stalls() as counts:
                trainer._aggregated_metrics(metrics, trainer._train_metrics)
            counted[f"{name} aggregate"] = counts
            with count_stalls() as counts:
                trainer.on_log(trainer._train_metrics)
            counted[f"{name} log"] = counts
            trainer._train_metrics = {}
    return counted


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_megatron_trainer(pools, world_size):
    for counted in pools(world_size).run(count_megatron, True):
        assert counted["upstream"].collectives == 3
        assert counted["upstream"].host_reads == 3 * world_size + 1
        assert (counted["ours"].collectives, counted["ours"].host_reads) == (0, 0)
        channels = len(set(CHANNELS))
        assert counted["upstream aggregate"].host_reads == channels + 1  # one for every metric
        assert counted["ours aggregate"].host_reads == 1  # the training loss
        # Both logs reduce the training loss, read whether it has tokens, and read it.
        assert (counted["upstream log"].collectives, counted["upstream log"].host_reads) == (1, channels + 2)
        together = world_size > 1
        ours = counted["ours log"]
        assert (ours.collectives - 1, ours.host_reads - 2) == ((2, 2) if together else (0, 1))


@pytest.mark.parametrize("world_size", [2])
def test_megatron_trainer_with_rows(pools, world_size):
    for counted in pools(world_size).run(count_megatron, False):
        assert counted["upstream"].collectives == 3
        assert counted["upstream"].host_reads == 3 * world_size + DOCUMENTS
        assert (counted["ours"].collectives, counted["ours"].host_reads) == (0, 0)


def count_fixed_vocabulary() -> Counts:
    """On a rank: what the second reduce of a fixed vocabulary costs."""
    import torch
    from harness.counting import count_stalls
    from segscatter import ChannelLossTracker, ChannelRegistry

    tracker = ChannelLossTracker(ChannelRegistry(["a"]))
    for _ in range(2):
        tracker.update(torch.ones(4), None, ["a"], cu_seqlens=[0, 4])
        with count_stalls() as counts:
            tracker.reduce()
    return counts


def test_fixed_vocabulary(pools):
    for counts in pools(2).run(count_fixed_vocabulary):
        assert (counts.collectives, counts.host_reads) == (1, 1)


def count_hf(packed: bool) -> dict[str, Counts]:
    """On a rank: compute_loss and log of ``swift sft``, upstream's and ours; and without channel losses."""
    import torch
    from harness import hf_upstream as hf
    from harness.counting import count_stalls

    batch = micro_batch()
    tokens = sum(len(d.losses) for d in batch.documents)
    inputs = (packed_inputs if packed else row_inputs)(batch, 0, tokens, 1)
    del inputs["seq_lens"]
    if not packed:
        del inputs["position_ids"]
    counted: dict[str, Counts] = {}
    for name in ("none", "upstream", "ours"):
        trainer = hf.seq2seq_trainer(torch.zeros(tokens + 1, hf.VOCABULARY), ours=name == "ours", padding_free=packed)
        trainer.args.enable_channel_loss = name != "none"
        given = dict(inputs)
        if name == "none":
            given["loss_scale"] = torch.ones(inputs["labels"].shape)  # the same branch of compute_loss
        for _ in range(2):
            with count_stalls() as counted[name]:
                trainer.compute_loss(trainer.model, dict(given))
            with count_stalls() as counted[f"{name} log"]:
                trainer.log({})
    return counted


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_seq2seq_trainer(pools, world_size, packed):
    for counted in pools(world_size).run(count_hf, packed):
        assert counted["none"].host_reads == 0
        assert counted["upstream"].host_reads == (6 * DOCUMENTS + 1 if packed else 6 * DOCUMENTS)
        assert (counted["ours"].collectives, counted["ours"].host_reads) == (0, 0)
        channels = len(set(CHANNELS))
        upstream, ours, none = counted["upstream log"], counted["ours log"], counted["none log"]
        assert upstream.collectives - none.collectives == channels
        assert upstream.host_reads - none.host_reads == 2 * channels
        extra = (ours.collectives - none.collectives, ours.host_reads - none.host_reads)
        assert extra == ((2, 2) if world_size > 1 else (0, 1))
