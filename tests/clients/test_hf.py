# SPDX-License-Identifier: Apache-2.0
"""ChannelLossMixin in the real transformers Trainer with a tiny Llama."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

VOCABULARY = 24
CHANNELS = ["code", "math", None]


def draw_examples(n: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    examples = []
    for _ in range(n):
        ids = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 9))]
        labels = [x if rng.random() < 0.7 else -100 for x in ids]
        example = {"input_ids": ids, "labels": labels, "channel": rng.choice(CHANNELS)}
        if example["channel"] is None and rng.random() < 0.5:
            del example["channel"]
        examples.append(example)
    return examples


def pad(examples: list[dict]) -> dict[str, Any]:
    """One row an example."""
    import torch

    width = max(len(e["input_ids"]) for e in examples)
    return {
        key: torch.tensor([e[key] + [fill] * (width - len(e[key])) for e in examples])
        for key, fill in (("input_ids", 0), ("labels", -100))
    }


def train(batches: str, registry_kind: str, output_dir: str) -> dict[str, Any]:
    """On a rank: the same training by Trainer and by ChannelLossMixin + Trainer."""
    import torch
    from harness.counting import count_stalls
    from segscatter import ChannelRegistry
    from segscatter.hf import ChannelCollator, ChannelLossMixin
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    batch_size = 3
    recorded: dict[str, list] = {"train": [], "eval": []}

    class Recording(Trainer):
        """Keeps logits and labels, and which examples they are of, for the oracle."""

        def compute_loss(self, model, inputs, return_outputs=False, *args, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, True, *args, **kwargs)
            mode = "train" if model.training else "eval"
            recorded[mode].append((outputs.logits.tolist(), inputs["labels"].tolist(), inputs["input_ids"].tolist()))
            return (loss, outputs) if return_outputs else loss

    class ChannelTrainer(ChannelLossMixin, Recording):
        stalls: list = []  # noqa: RUF012

        def _track(self, *args):
            with count_stalls() as counts:
                super()._track(*args)
            self.stalls.append((counts.collectives, counts.host_reads))

    collator = {
        "packed": DataCollatorWithFlattening(return_flash_attn_kwargs=True),
        "positions": DataCollatorWithFlattening(),
        "rows": pad,
    }[batches]
    registry = ChannelRegistry(["math", "code"])
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    result = {}
    for ours in (False, True):
        recorded["train"].clear()
        recorded["eval"].clear()
        torch.manual_seed(1)
        options: dict[str, Any] = {"channel_registry": registry if registry_kind == "fixed" else None} if ours else {}
        data = ChannelCollator(collator, registry if registry_kind == "fixed" else None) if ours else (
            lambda examples: collator([{k: v for k, v in e.items() if k != "channel"} for e in examples])
        )  # fmt: skip
        trainer = (ChannelTrainer if ours else Trainer)(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(
                output_dir=output_dir,
                use_cpu=True,
                per_device_train_batch_size=batch_size,
                per_device_eval_batch_size=batch_size,
                max_steps=4,
                logging_steps=2,
                eval_strategy="steps",
                eval_steps=2,
                gradient_accumulation_steps=2,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                remove_unused_columns=False,
                learning_rate=1e-2,
                dataloader_num_workers=0,
            ),
            data_collator=data,
            train_dataset=draw_examples(64, 1),
            eval_dataset=draw_examples(12, 2),
            **options,
        )
        trainer.train()
        result["ours" if ours else "plain"] = {
            "history": trainer.state.log_history,
            "weights": [p.detach().clone() for p in trainer.model.parameters()],
        }
    return {**result, "recorded": recorded, "stalls": ChannelTrainer.stalls}


def oracle(recorded: list, examples: list[dict]) -> dict[str, list]:
    """[losses, count] by channel: every token of every document, cross entropy in float64."""
    by_ids = {tuple(e["input_ids"]): e.get("channel") for e in examples}
    totals: dict[str, list] = {}
    for logits, labels, ids in recorded:
        for row_logits, row_labels, row_ids in zip(logits, labels, ids, strict=True):
            for begin, end, channel in documents(row_ids, by_ids):
                total = totals.setdefault(str(channel), [[], 0])
                for t in range(begin, end - 1):
                    target = row_labels[t + 1]
                    if target != -100:
                        total[0].append(cross_entropy(row_logits[t], target))
                        total[1] += 1
    return totals


def documents(ids: list[int], by_ids: dict) -> list[tuple[int, int, object]]:
    """Cuts a row into the examples that it is made of; a row of one example may be padded."""
    found, begin = [], 0
    while begin < len(ids):
        for end in range(len(ids), begin, -1):
            if tuple(ids[begin:end]) in by_ids:
                found.append((begin, end, by_ids[tuple(ids[begin:end])]))
                break
        else:
            break
        begin = end
    return found


def cross_entropy(logits: list[float], target: int) -> float:
    top = max(logits)
    return top + math.log(math.fsum(math.exp(x - top) for x in logits)) - logits[target]


@pytest.mark.parametrize(
    ("world_size", "batches", "registry"),
    [(1, "packed", "fixed"), (1, "rows", "growing"), (2, "packed", "growing"), (2, "positions", "fixed")],
)
def test_trainer(pools, world_size, batches, registry, tmp_path):
    ranks = pools(world_size, trainers=False).run(train, batches, registry, str(tmp_path))
    examples = draw_examples(64, 1) + draw_examples(12, 2)
    for mode, logs_of_mode, per_log in (("train", "loss", 4), ("eval", "eval_loss", None)):
        entries = [[e for e in rank["ours"]["history"] if logs_of_mode in e] for rank in ranks]
        assert len(entries[0]) == 2
        for i in range(2):
            totals: dict[str, list] = {}
            for rank in ranks:
                recorded = rank["recorded"][mode]
                n = per_log or len(recorded) // 2
                for channel, (losses, count) in oracle(recorded[i * n : (i + 1) * n], examples).items():
                    total = totals.setdefault(channel, [[], 0])
                    total[0] += losses
                    total[1] += count
            truth = {f"{logs_of_mode}_{c}": math.fsum(x) / n for c, (x, n) in totals.items() if n}
            for rank_entries in entries:
                channels = {k: v for k, v in rank_entries[i].items() if k.startswith(f"{logs_of_mode}_")}
                assert channels == pytest.approx(truth, rel=2e-6)
    for rank in ranks:
        plain, ours = rank["plain"], rank["ours"]
        assert all(a.equal(b) for a, b in zip(plain["weights"], ours["weights"], strict=True))
        for before, after in zip(plain["history"][:-1], ours["history"][:-1], strict=True):
            for key in {"loss", "grad_norm", "eval_loss"} & before.keys():
                assert before[key] == after[key]
        assert set(rank["stalls"]) == {(0, 0)}


def test_errors():
    import torch
    from segscatter import ChannelRegistry
    from segscatter.hf import ChannelCollator, ChannelLossMixin, offsets_from_position_ids, token_losses

    with pytest.raises(ValueError, match="registry must be fixed"):
        ChannelCollator(pad, ChannelRegistry(grow=True))
    mixin = ChannelLossMixin()
    with pytest.raises(ValueError, match="3 channels for 2 rows; a packed batch needs cu_seq_lens_q"):
        mixin._track(torch.ones(2, 4), None, ["a", "b", "c"], {}, "train")
    assert offsets_from_position_ids(torch.tensor([[0, 1, 0, 0, 1, 2]]), 3).tolist() == [0, 2, 3, 6]
    assert offsets_from_position_ids(torch.tensor([[0, 1, 0, 0, 1, 2]]), 2).tolist() == [0, 2, 3]
    assert token_losses(torch.zeros(1, 0, 5), torch.zeros(1, 0, dtype=torch.long)).shape == (1, 0)
