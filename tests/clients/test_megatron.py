# SPDX-License-Identifier: Apache-2.0
"""wrap_loss_func in the real Megatron-Core schedule around a real GPTModel."""

from __future__ import annotations

import itertools
import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

CHANNELS = ["code", "math", "web"]
FORMS = ["three", "two", "tuples"]


def loss_func_three(loss_mask: Tensor, output_tensor: Tensor) -> Any:
    """As Megatron-LM from 0.13 on: the sum, the number of tokens, and [sum, count] for the training loop to reduce."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().clone().view(1), num_tokens.view(1)])}


def loss_func_two(loss_mask: Tensor, output_tensor: Tensor) -> Any:
    """The old form: the mean, and its average over data parallelism."""
    from megatron.core import parallel_state

    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask) / mask.sum().clamp(min=1)
    average = loss.detach().clone()
    torch.distributed.all_reduce(average, group=parallel_state.get_data_parallel_group())
    return loss, {"lm loss": average / parallel_state.get_data_parallel_world_size()}


def loss_func_tuples(loss_mask: Tensor, output_tensor: Tensor) -> Any:
    """As Megatron-LM 0.12: views of one tensor, reduced inside, and a tuple in the report."""
    from megatron.core import parallel_state

    mask = loss_mask.view(-1).float()
    loss = torch.cat([torch.sum(output_tensor.view(-1).float() * mask).view(1), mask.sum().view(1)])
    reporting = loss.detach().clone()
    torch.distributed.all_reduce(reporting, group=parallel_state.get_data_parallel_group())
    return loss[0].clone(), loss[1].detach().clone().to(torch.int), {"lm loss": (reporting[0], reporting[1])}


LOSS_FUNCS = {"three": loss_func_three, "two": loss_func_two, "tuples": loss_func_tuples}


def draw_micro_batches(seed: str, n: int, *, rows: int) -> list[dict[str, Any]]:
    """rows=1: documents in one row, with boundaries; else every row is a document."""
    from harness.gpt import SEQUENCE, VOCABULARY

    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    batches = []
    for _ in range(n):
        tokens = torch.randint(0, VOCABULARY, (rows, SEQUENCE + 1), generator=generator)
        batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
        batch["loss_mask"] = (torch.rand(rows, SEQUENCE, generator=generator) < 0.7).float()
        if rows == 1:
            cuts = sorted(rng.sample(range(1, SEQUENCE), 3))
            # The last document has no channel: padding. Offsets are padded by repeating the last, and come as [1, N].
            batch["cu_seqlens_q"] = torch.tensor([[0, *cuts, SEQUENCE, SEQUENCE, SEQUENCE]], dtype=torch.int32)
            batch["channels"] = [rng.choice([*CHANNELS, None, "unheard of"]) for _ in cuts]
        else:
            batch["channels"] = [rng.choice([*CHANNELS, None]) for _ in range(rows)]
        batches.append(batch)
    return batches


def train(form: str, rows: int, tp: int, report: str | None) -> dict[str, Any]:
    """On a rank: two iterations without and with the wrapper; the token losses of every micro-batch too."""
    from harness import gpt, upstream
    from harness.counting import count_stalls
    from megatron.core import parallel_state
    from segscatter import ChannelLossTracker, ChannelRegistry
    from segscatter.megatron import data_parallel_group, log_channel_losses, wrap_loss_func

    upstream.initialize_parallel(tp=tp)
    dp_rank = parallel_state.get_data_parallel_rank()
    steps = [draw_micro_batches(f"{rows} {dp_rank} {step}", 3, rows=rows) for step in range(2)]
    model = gpt.build_model(per_token_loss=form != "two")
    tracker = ChannelLossTracker(ChannelRegistry(CHANNELS), group=data_parallel_group)
    plain_results, wrapped_results, documents, stalls = [], [], [], []

    def plain(batch: dict) -> Any:
        loss_func = partial(LOSS_FUNCS[form], batch["loss_mask"])

        def recording(output_tensor: Tensor) -> Any:
            documents.append((batch, output_tensor.detach().clone()))
            return loss_func(output_tensor)

        return recording

    def wrapped(batch: dict) -> Any:
        loss_func = wrap_loss_func(
            partial(LOSS_FUNCS[form], batch["loss_mask"]), tracker, batch["channels"], loss_mask=batch["loss_mask"],
            packed_seq_params=batch if rows == 1 else None, report=report,
        )  # fmt: skip

        def counted(output_tensor: Tensor) -> Any:
            with count_stalls() as plain_counts:
                LOSS_FUNCS[form](batch["loss_mask"], output_tensor)
            with count_stalls() as counts:
                result = loss_func(output_tensor)
            extra = (counts.collectives - plain_counts.collectives, counts.host_reads - plain_counts.host_reads)
            stalls.append(extra)
            return result

        return counted

    for step in steps:
        plain_results.append(gpt.run_iteration(model, step, plain))
    for step in steps:
        wrapped_results.append(gpt.run_iteration(model, step, wrapped))
    state = tracker.state_dict()["totals"]["train"]
    with count_stalls():
        tracker.reduce("never used")  # the first reduce also compares the vocabularies
    with count_stalls() as log_stalls:
        logged = log_channel_losses(tracker, 20, 10)
    return {
        "documents": documents, "plain": plain_results, "wrapped": wrapped_results, "stalls": stalls, "state": state,
        "logged": logged, "log_stalls": log_stalls, "dp_rank": dp_rank,
    }  # fmt: skip


def channel_slot(channel: object) -> str:
    return "None" if channel is None else channel if channel in CHANNELS else "other"


def document_loop(documents: list) -> dict[str, list]:
    """[sum, count] of every channel, document by document, token by token."""
    totals: dict[str, list] = {}
    for batch, losses in documents:
        if "cu_seqlens_q" in batch:
            offsets = batch["cu_seqlens_q"].flatten().tolist()
            losses, mask = losses.flatten().tolist(), batch["loss_mask"].flatten().tolist()
            pieces = [(losses[a:b], mask[a:b]) for a, b in itertools.pairwise(offsets)]
        else:
            pieces = list(zip(losses.tolist(), batch["loss_mask"].tolist(), strict=True))
        for channel, (values, mask) in zip(batch["channels"], pieces, strict=False):
            total = totals.setdefault(channel_slot(channel), [[], 0])
            total[0] += [v for v, m in zip(values, mask, strict=True) if m]
            total[1] += sum(m != 0 for m in mask)
    return {name: [math.fsum(values), count] for name, (values, count) in totals.items() if count}


@pytest.mark.parametrize("report", [None, "keys"])
@pytest.mark.parametrize("rows", [1, 3], ids=["packed", "rows"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tp", [1, 2], ids=["dp2", "tp2"])
@pytest.mark.filterwarnings("ignore:.*outside the vocabulary")
def test_training_is_unchanged_and_statistics_are_right(pools, tp, form, rows, report):
    ranks = pools(2).run(train, form, rows, tp, report)
    for rank in ranks:
        for (collected, gradients), (wrapped, wrapped_gradients) in zip(rank["plain"], rank["wrapped"], strict=True):
            assert all(a.equal(b) for a, b in zip(gradients, wrapped_gradients, strict=True))
            assert any(g.count_nonzero() for g in gradients)
            for before, after in zip(collected, wrapped, strict=True):
                assert flat(before["lm loss"]) == flat(after["lm loss"])
                names = [f"loss_{c}" for c in [*CHANNELS, "None", "other"]] if report else []
                assert list(after) == ["lm loss", *names]
        assert set(rank["stalls"]) == {(0, 0)}, "collectives and host reads in a micro-batch"
        assert (rank["log_stalls"].collectives, rank["log_stalls"].host_reads) == (1 if tp == 1 else 0, 1)
    replicas = [r for r in ranks if tp == 1 or r["dp_rank"] == 0]
    truth = document_loop([d for r in (replicas if tp == 1 else replicas[:1]) for d in r["documents"]])
    for rank in ranks:
        assert rank["logged"] == pytest.approx({f"loss_{k}": s / c for k, (s, c) in truth.items()}, rel=1e-6)
        if report:
            for (batch, losses), after in zip(
                rank["documents"], [m for w, _ in rank["wrapped"] for m in w], strict=True
            ):
                local = document_loop([(batch, losses)])
                for name in [*CHANNELS, "None", "other"]:
                    entry = after[f"loss_{name}"]
                    assert isinstance(entry, tuple if form == "tuples" else Tensor)
                    assert flat(entry) == pytest.approx(local.get(name, [0, 0]), rel=1e-6)


def flat(entry: Any) -> list[float]:
    return [float(x) for x in (entry if isinstance(entry, tuple) else entry.view(-1))]


def run_twice() -> tuple[int, dict]:
    """On a rank: Megatron's own re-run state machine rejects a result and repeats the iteration on the same data."""
    from unittest import mock

    from harness.upstream import CudaFactoriesOnCpu, stub

    stub()
    from megatron.core import rerun_state_machine as rerun
    from segscatter import ChannelLossTracker, ChannelRegistry
    from segscatter.megatron import wrap_loss_func

    tracker = ChannelLossTracker(ChannelRegistry(["a"]))
    passes = 0
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine = rerun.get_rerun_state_machine()

    def loss_func(output_tensor: Tensor) -> Any:
        machine.validate_result(
            result=output_tensor.sum(), rejection_func=lambda _: True, message="loss", tolerance=0.0, fatal=False
        )
        return output_tensor.sum(), {}

    cuda_random = mock.patch.multiple(torch.cuda, get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state)
    try:
        with cuda_random, CudaFactoriesOnCpu():
            data = rerun.RerunDataIterator(iter([torch.ones(1, 4), torch.full((1, 4), 2.0)]))
            for _ in range(2):
                while machine.should_run_forward_backward(data):
                    wrap_loss_func(loss_func, tracker, ["a"])(next(data))
                    passes += 1
                machine.should_checkpoint_and_exit()
    finally:
        rerun.destroy_rerun_state_machine()
    return passes, tracker.reduce()


def test_a_rerun_of_an_iteration_counts_once(pools):
    [(passes, stats)] = pools(1).run(run_twice)
    assert passes == 3  # Megatron trusts the first iteration
    assert (stats["a"].sum, stats["a"].count) == (12.0, 8)
