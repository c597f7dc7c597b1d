# SPDX-License-Identifier: Apache-2.0
"""wrap_loss_func under Megatron's own tensor, context and hybrid context parallelism."""

from __future__ import annotations

from typing import Any

import pytest


def losses_of(length: int, first: float) -> Any:
    import torch

    return torch.arange(length, dtype=torch.float32) / 8 + first


def tracker_over(group: Any) -> Any:
    from segscatter import ChannelLossTracker, ChannelRegistry

    return ChannelLossTracker(ChannelRegistry(["a", "b"]), group=group)


def summed(output_tensor: Any) -> Any:
    return output_tensor.sum(), {}


def totals(tracker: Any) -> dict[str, tuple[float, int]]:
    return {name: (stat.sum, stat.count) for name, stat in tracker.reduce().items()}


def track_on_tensor_parallel_rank_0() -> dict:
    """On a rank: only tensor-parallel rank 0 knows the channels and wraps the loss function."""
    from harness import upstream
    from megatron.core import parallel_state
    from segscatter.megatron import tensor_and_data_parallel_group, wrap_loss_func

    upstream.initialize_parallel(tp=2)
    tracker = tracker_over(tensor_and_data_parallel_group)
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        replica = parallel_state.get_data_parallel_rank()
        wrap_loss_func(summed, tracker, ["a"])(losses_of(4, replica)[None])
    return totals(tracker)


@pytest.mark.parametrize("world_size", [2, 4])
def test_channels_known_to_tensor_parallel_rank_0_only(pools, world_size):
    replicas = world_size // 2
    total = sum(replica * 4 + 6 / 8 for replica in range(replicas))
    for found in pools(world_size).run(track_on_tensor_parallel_rank_0):
        assert found == {"a": (total, 4 * replicas)}


def track_cut_rows(packed: bool) -> dict:
    """On a rank: Megatron's cut of a row of 16 tokens (documents [0, 6, 16] or [0, 8, 16]) over two ranks."""
    import torch
    from harness import upstream
    from mcore_bridge.utils import split_cp_inputs
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_cp_rank
    from segscatter.megatron import data_parallel_group, wrap_loss_func

    upstream.initialize_parallel(cp=2)
    offsets = torch.tensor([0, 8, 16] if packed else [0, 6, 16], dtype=torch.int32)
    losses = losses_of(16, 0)[None]
    mask = torch.ones(1, 16)
    mask[0, 7] = 0
    if packed:
        losses, mask = (split_cp_inputs(x, offsets, -1) for x in (losses, mask))
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets)
    else:
        batch = get_batch_on_this_cp_rank({"losses": losses, "loss_mask": mask})
        losses, mask = batch["losses"], batch["loss_mask"]
        params = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=offsets)
    tracker = tracker_over(data_parallel_group)
    wrap_loss_func(summed, tracker, ["a", "b"], loss_mask=mask, packed_seq_params=params)(losses)
    return totals(tracker)


@pytest.mark.parametrize("packed", [True, False], ids=["per_document", "per_sequence"])
def test_the_layout_is_found(pools, packed):
    cut = 8 if packed else 6
    a, b = [t for t in range(cut) if t != 7], [t for t in range(cut, 16) if t != 7]
    for found in pools(2).run(track_cut_rows, packed):
        assert found == {"a": (sum(a) / 8, len(a)), "b": (sum(b) / 8, len(b))}


SAMPLES = [  # (length, first loss, channel, ranks that share it)
    (16, 0.0, "a", (0, 1, 2, 3)),
    (8, 10.0, "b", (0, 1)),
    (12, 20.0, "a", (2, 3)),
    (5, 30.0, "b", (3,)),
    (3, 40.0, None, (3,)),
]


def track_hybrid() -> dict:
    """On a rank: every sample is shared by a group of its own, so ranks run different numbers of micro-batches."""
    import torch
    from harness import upstream
    from harness.counting import count_stalls
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_hybrid_cp_rank
    from segscatter.megatron import data_parallel_group, wrap_loss_func

    upstream.stub()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(hybrid_context_parallel=True)
    tracker = tracker_over(data_parallel_group)
    with count_stalls() as counts:
        for length, first, channel, ranks in SAMPLES:
            if torch.distributed.get_rank() not in ranks:
                continue
            with upstream.CudaFactoriesOnCpu():
                batch, params = get_batch_on_this_hybrid_cp_rank(
                    {"tokens": torch.zeros(length), "losses": losses_of(length, first)}, len(ranks)
                )
            wrap_loss_func(summed, tracker, [channel], packed_seq_params=params)(batch["losses"])
    return {"collectives": counts.collectives, "totals": totals(tracker)}


def test_hybrid_context_parallel(pools):
    truth: dict[str, list] = {}
    for length, first, channel, _ in SAMPLES:
        total = truth.setdefault(str(channel), [0.0, 0])
        total[0] += sum(first + t / 8 for t in range(length))
        total[1] += length
    for found in pools(4).run(track_hybrid):
        assert found["totals"] == {name: tuple(total) for name, total in truth.items()}
        assert found["collectives"] == 0
