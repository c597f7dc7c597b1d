# SPDX-License-Identifier: Apache-2.0
"""The plugin in ms-swift's real MegatronTrainer: same metrics as upstream, and the same training."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
from harness.batches import MicroBatch, Totals, draw_micro_batch, loss_table, packed_inputs, row_inputs

SEEDS = range(12)


@dataclass(frozen=True)
class Layout:
    world_size: int
    cp: int
    packed: bool

    def __str__(self) -> str:
        return f"{self.world_size}ranks-cp{self.cp}-{'packed' if self.packed else 'rows'}"


LAYOUTS = [
    Layout(1, 1, True), Layout(1, 1, False),
    Layout(2, 1, True), Layout(2, 1, False), Layout(2, 2, True), Layout(2, 2, False),
    Layout(4, 1, True), Layout(4, 1, False), Layout(4, 2, True),
]  # fmt: skip


@dataclass
class Run:
    """One data-parallel rank's share of a run: two training iterations with an evaluation in between, then a log."""

    train: list[list[MicroBatch]]
    evaluation: list[MicroBatch]

    def micro_batches(self) -> list[MicroBatch]:
        return [b for step in self.train for b in step] + self.evaluation


def draw_run(seed: int, dp_rank: int, layout: Layout) -> Run:
    shape = random.Random(f"shape {seed}")  # all ranks run the same number of micro-batches
    steps, evaluations = [shape.randint(1, 3) for _ in range(2)], shape.randint(1, 2)
    rng = random.Random(f"data {seed} {dp_rank}")
    multiple = 2 * layout.cp if layout.cp > 1 else 1
    tail = multiple if layout.packed else 0

    def draw(n: int) -> list[MicroBatch]:
        return [draw_micro_batch(rng, multiple=multiple, tail_multiple=tail) for _ in range(n)]

    return Run([draw(n) for n in steps], draw(evaluations))


def inputs_of(run: Run, layout: Layout) -> tuple[list[float], list[dict[str, Any]]]:
    losses = loss_table(run.micro_batches())
    inputs, first = [], 0
    multiple = 2 * layout.cp if layout.cp > 1 else 1
    for batch in run.micro_batches():
        lay_out = packed_inputs if layout.packed else row_inputs
        inputs.append(lay_out(batch, first, len(losses) - 1, multiple))
        first += sum(len(d.losses) for d in batch.documents)
    return losses, inputs


def run_trainer(layout: Layout, seeds: list[int]) -> list[dict[str, Any]]:
    """On a rank: every seed through the upstream trainer and through ours."""
    import torch
    from harness import upstream
    from megatron.core import parallel_state

    upstream.initialize_parallel(cp=layout.cp)
    results = []
    for seed in seeds:
        run = draw_run(seed, parallel_state.get_data_parallel_rank(), layout)
        losses, inputs = inputs_of(run, layout)
        result = {}
        for ours in (False, True):
            trainer = upstream.megatron_trainer(torch.tensor(losses), ours=ours, padding_free=layout.packed)
            batches = iter([dict(x) for x in inputs])
            outputs = []

            def iteration(micro_batches: list, trainer=trainer, batches=batches, outputs=outputs) -> None:
                metrics = upstream.forward_backward(trainer, [next(batches) for _ in micro_batches])
                outputs.extend(metrics)
                trainer._aggregated_metrics(metrics, trainer._train_metrics)

            iteration(run.train[0])
            second = [next(batches) for _ in run.train[1]]
            trainer.args.num_microbatches = len(run.evaluation)
            evaluated = upstream.evaluate(trainer, list(batches))
            batches = iter(second)
            outputs.extend(metrics := upstream.forward_backward(trainer, second))
            trainer._aggregated_metrics(metrics, trainer._train_metrics)
            totals = {k: v.tolist() for k, v in trainer._train_metrics.items() if k.startswith("loss_")}
            if ours:
                state = trainer._segscatter_tracker.state_dict()
                sums, counts = state["totals"]["train"]["sums"], state["totals"]["train"]["counts"]
                totals = {
                    f"loss_{None if kind == 'NoneType' else text}": [float(s), int(c)]
                    for (kind, text), s, c in zip(state["channels"], sums, counts, strict=True)
                }
            trainer.on_log(trainer._train_metrics)
            result["ours" if ours else "upstream"] = {
                "totals": totals,
                "train": trainer._last_logged_metrics,
                "eval": evaluated,
                "loss": [m["loss"].tolist() for m in outputs],
                "gradient": trainer.wrapped_models[0].table.grad.tolist(),
            }
        results.append(result)
    return results


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_metrics_are_those_of_upstream(pools, layout):
    ranks = pools(layout.world_size).run(run_trainer, layout, list(SEEDS))
    for i, seed in enumerate(SEEDS):
        runs = [draw_run(seed, dp_rank, layout) for dp_rank in range(layout.world_size // layout.cp)]
        for run in runs:
            inputs_of(run, layout)  # marks the batches that carry no channels
        train = Totals().add(b for run in runs for step in run.train for b in step)
        evaluation = Totals().add(b for run in runs for b in run.evaluation)
        for rank in ranks:
            upstream, ours = rank[i]["upstream"], rank[i]["ours"]
            assert ours["train"] == pytest.approx(upstream["train"], rel=1e-6), f"seed {seed}"
            assert ours["eval"] == pytest.approx(upstream["eval"], rel=1e-6), f"seed {seed}"
            assert channel_metrics(ours["train"]) == pytest.approx(train.means(), rel=1e-6), f"seed {seed}"
            assert channel_metrics(ours["eval"], "eval_") == pytest.approx(
                {f"eval_{k}": v for k, v in evaluation.means().items()}, rel=1e-6
            ), f"seed {seed}"
            assert ours["loss"] == upstream["loss"], f"seed {seed}: the training loss changed"
            assert ours["gradient"] == upstream["gradient"], f"seed {seed}: gradients changed"
        summed: dict[str, list] = {}
        for rank in ranks:  # ours are this rank's own; upstream's are reduced already
            for name, (s, c) in rank[i]["ours"]["totals"].items():
                total = summed.setdefault(name, [0.0, 0])
                total[0] += s
                total[1] += c
        summed = {name: total for name, total in summed.items() if total[1]}
        upstream = ranks[0][i]["upstream"]["totals"]
        assert {k: v[1] for k, v in summed.items()} == {k: v[1] for k, v in upstream.items()}, f"seed {seed}"
        assert {k: v[0] for k, v in summed.items()} == pytest.approx({k: v[0] for k, v in upstream.items()}, rel=1e-6)
        assert {k: v[1] for k, v in summed.items()} == {f"loss_{k}": n for k, n in train.counts.items()}


def channel_metrics(logged: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    return {k: v for k, v in logged.items() if k.startswith(f"{prefix}loss_")}
