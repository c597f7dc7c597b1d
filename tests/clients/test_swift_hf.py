# SPDX-License-Identifier: Apache-2.0
"""The plugin in ms-swift's real Seq2SeqTrainer (``swift sft``): same metrics as upstream, and the same training."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness.batches import MicroBatch, Totals, draw_micro_batch, packed_inputs, row_inputs

SEEDS = range(12)


def draw_run(seed: int, rank: int) -> dict[str, list[MicroBatch]]:
    shape = random.Random(f"shape {seed}")
    rng = random.Random(f"data {seed} {rank}")
    return {mode: [draw_micro_batch(rng) for _ in range(shape.randint(1, 4))] for mode in ("train", "eval")}


def run_trainer(packed: bool, seeds: list[int]) -> list[dict[str, Any]]:
    """On a rank: every seed through the upstream trainer and through ours. Puts the true losses into the documents."""
    import torch
    from harness import hf_upstream as hf

    results = []
    for seed in seeds:
        run = draw_run(seed, torch.distributed.get_rank())
        batches = run["train"] + run["eval"]
        tokens = sum(len(d.losses) for b in batches for d in b.documents)
        logits = torch.randn(tokens + 1, hf.VOCABULARY, generator=torch.Generator().manual_seed(seed))
        losses = iter(logits.double().logsumexp(-1) - logits.double()[:, 7])
        inputs, first = [], 0
        for batch in batches:
            inputs.append((packed_inputs if packed else row_inputs)(batch, first, tokens, 1))
            for document in batch.documents:
                document.losses = [float(next(losses)) for _ in document.losses]
                first += len(document.losses)
        result = {"run": run}
        for ours in (False, True):
            trainer = hf.seq2seq_trainer(logits, ours=ours, padding_free=packed)
            training_losses = []
            for i, batch in enumerate(inputs):
                trainer.model.train(i < len(run["train"]))
                given = {k: v for k, v in batch.items() if k != "seq_lens"}
                if not packed:
                    del given["position_ids"]
                with torch.set_grad_enabled(trainer.model.training):
                    loss = trainer.compute_loss(trainer.model, given)
                training_losses.append(loss.item())
                if trainer.model.training:
                    loss.backward()
            logged = {}
            for mode in ("eval", "train"):
                trainer.model.train(mode == "train")
                trainer.log(logged.setdefault(mode, {"learning_rate": 1e-3}))
            result["ours" if ours else "upstream"] = {
                **logged, "loss": training_losses, "gradient": trainer.model.table.grad
            }  # fmt: skip
        results.append(result)
    return results


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "rows"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_metrics_are_those_of_upstream(pools, world_size, packed):
    ranks = pools(world_size).run(run_trainer, packed, list(SEEDS))
    for i, seed in enumerate(SEEDS):
        for mode, prefix in (("train", ""), ("eval", "eval_")):
            truth = Totals().add(b for rank in ranks for b in rank[i]["run"][mode]).means(f"{prefix}loss_")
            for rank in ranks:
                upstream, ours = rank[i]["upstream"][mode], rank[i]["ours"][mode]
                assert ours == pytest.approx(upstream, rel=1e-6), f"seed {seed}"
                assert ours == pytest.approx({"learning_rate": 1e-3, **truth}, rel=1e-6), f"seed {seed}"
        for rank in ranks:
            upstream, ours = rank[i]["upstream"], rank[i]["ours"]
            assert ours["loss"] == pytest.approx(upstream["loss"], rel=0, abs=0, nan_ok=True)
            assert ours["gradient"].nan_to_num(7).equal(upstream["gradient"].nan_to_num(7))
