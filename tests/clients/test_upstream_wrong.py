# SPDX-License-Identifier: Apache-2.0
"""Inputs on which ms-swift's own channel losses are wrong: both results, and the true one."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest


def both(losses: list, mask: list, offsets: list[int], channels: list, cp: int = 1, partition: str = "zigzag") -> dict:
    """On a rank: {"upstream" / "ours": what is logged} for packed documents given as lists."""
    import torch
    from harness import upstream

    upstream.initialize_parallel(cp=cp)
    results = {}
    for ours in (False, True):
        trainer = upstream.megatron_trainer(torch.zeros(1), ours=ours, cp_partition_mode=partition)
        packed = SimpleNamespace(
            seq_lens=torch.zeros(len(offsets) - 1), cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32)
        )
        arguments = torch.tensor([losses]), torch.tensor([mask], dtype=torch.bool), channels, packed
        if cp > 1:
            from mcore_bridge.utils import split_cp_inputs

            cut = [split_cp_inputs(x, packed.cu_seqlens_q, -1, cp_partition_mode=partition) for x in arguments[:2]]
            arguments = (*cut, *arguments[2:])
        metrics = trainer._compute_channel_loss(*arguments)
        trainer._aggregated_metrics([metrics], trainer._train_metrics)
        trainer.on_log(trainer._train_metrics)
        results["ours" if ours else "upstream"] = trainer._last_logged_metrics
    return results


def test_nan_under_the_mask(pools):
    """Upstream multiplies by the mask, and NaN * 0 is NaN. A token that does not count must not."""
    [found] = pools(1).run(both, [1.0, math.nan, 3.0, 4.0], [1, 0, 1, 1], [0, 2, 4], ["a", "b"])
    assert math.isnan(found["upstream"]["loss_a"])
    assert found["ours"] == {"loss_a": 1.0, "loss_b": 3.5}


@pytest.mark.parametrize(
    ("channels", "upstream", "ours"),
    [
        ([1, "1"], {"loss_1": 3.5}, {"loss_1": 3.5, "loss_1 (int)": 1.5}),
        ([None, "None"], {"loss_None": 3.5}, {"loss_None": 3.5, "loss_None (NoneType)": 1.5}),
    ],
)
@pytest.mark.filterwarnings("ignore:channels of different types")
def test_channels_of_one_name(pools, channels, upstream, ours):
    """Upstream forgets the first of two channels that are written alike; ours keeps both, under two names."""
    [found] = pools(1).run(both, [1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1], [0, 2, 4], channels)
    assert found["upstream"] == upstream
    assert found["ours"] == ours


def test_contiguous_context_parallel(pools):
    """Upstream divides the offsets, as the zigzag cut allows; the contiguous one cuts the row and not the documents."""
    losses = [float(t) for t in range(1, 9)]
    for found in pools(2).run(both, losses, [1] * 8, [0, 2, 8], ["a", "b"], 2, "contiguous"):
        assert found["upstream"] == {"loss_a": 6 / 2, "loss_b": 30 / 6}
        assert found["ours"] == {"loss_a": 3 / 2, "loss_b": 33 / 6}


def count_past_2_to_24() -> dict[str, list[float]]:
    import torch
    from harness import upstream

    upstream.initialize_parallel()
    many = 1 << 24
    trainer = upstream.megatron_trainer(torch.zeros(1), ours=False)
    for n in [many] + [1] * 8:
        trainer._aggregated_metrics([{"loss_a": torch.tensor([n, n], dtype=torch.float32)}], trainer._train_metrics)
    found = {"upstream": trainer._train_metrics["loss_a"].tolist()}
    trainer = upstream.megatron_trainer(torch.zeros(1), ours=True)
    for n in [many] + [1] * 8:
        packed = SimpleNamespace(seq_lens=torch.zeros(1), cu_seqlens_q=torch.tensor([0, n]))
        trainer._compute_channel_loss(torch.ones(1, n), torch.ones(1, n, dtype=torch.bool), ["a"], packed)
    stat = trainer._segscatter_tracker.reduce()["a"]
    found["ours"] = [stat.sum, stat.count]
    return found


def test_intervals_of_more_than_2_to_24_tokens(pools):
    """float32 has no number between 2^24 and 2^24 + 2."""
    [found] = pools(1).run(count_past_2_to_24)
    assert found["upstream"] == [16777216.0, 16777216.0]
    assert found["ours"] == [16777224.0, 16777224]


def test_large_losses(pools):
    """Upstream adds one token after the other in float32 (on a GPU: in another order every time)."""
    losses = [10000.0, 10000.125] * 32768
    [found] = pools(1).run(both, losses, [1] * 65536, [0, 65536], ["a"])
    assert found["upstream"]["loss_a"] == pytest.approx(10003.639648, rel=1e-7)
    assert found["ours"]["loss_a"] == pytest.approx(10000.0625, rel=1e-15)


def channels_missing_on_rank_0() -> str:
    import torch
    from harness import upstream

    upstream.initialize_parallel()
    trainer = upstream.megatron_trainer(torch.zeros(1), ours=True)
    packed = SimpleNamespace(seq_lens=torch.zeros(2), cu_seqlens_q=torch.tensor([0, 2, 4], dtype=torch.int32))
    channels = ["a", "b"][torch.distributed.get_rank() == 0 :]
    try:
        trainer._compute_channel_loss(torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool), channels, packed)
    except ValueError as error:
        return str(error)
    return "counted"


def test_too_few_channels_on_one_rank(pools):
    """Upstream raises on that rank while the others wait in a collective; here nobody waits for it."""
    assert pools(2).run(channels_missing_on_rank_0) == ["there are 1 channels for 2 documents", "counted"]
