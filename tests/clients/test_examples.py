# SPDX-License-Identifier: Apache-2.0
"""Runs examples/, and holds the guides in docs/ to them."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = {
    "megatron": ["megatron_lm.py", "megatron_bridge.py"],
    "ms-swift": ["ms_swift.sh", "ms_swift_plugin.py"],
    "huggingface": ["hf_trainer.py"],
}


def blocks(text: str, *languages: str) -> list[str]:
    return [body for language, body in re.findall(r"```(\w+)\n(.*?)```", text, re.S) if language in languages]


@pytest.mark.parametrize("guide", GUIDES)
def test_guides_show_what_is_run(guide):
    """Every block of code in a guide is part of an example, or a snippet that test_snippets runs."""
    examples = [(ROOT / "examples" / name).read_text() for name in GUIDES[guide]]
    shown = blocks((ROOT / "docs" / f"{guide}.md").read_text(), "python", "sh")
    assert shown
    for block in shown:
        is_snippet = block.startswith("# snippet") or "python -m segscatter.swift" in block
        assert is_snippet or any(block.strip() in example for example in examples), block


@pytest.mark.parametrize("guide", GUIDES)
def test_snippets(guide):
    """Blocks that begin with "# snippet" run as they are, one after the other."""
    text = (ROOT / "docs" / f"{guide}.md").read_text()
    snippets = [b for b in blocks(text, "python") if b.startswith("# snippet")]
    if snippets:
        exec(compile("\n".join(snippets), f"docs/{guide}.md", "exec"), {})


class Writer:
    """A TensorBoard writer and a W&B run in one."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}
        self.logged: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(values)


def modules(**contents: dict[str, Any]) -> None:
    """Puts modules in sys.modules: those of Megatron that its wheel leaves out."""
    for name, attributes in contents.items():
        name = name.replace("__", ".")
        module = types.ModuleType(name)
        vars(module).update(attributes)
        module.__path__ = []
        sys.modules[name] = module


def draw(rank: int, step: int, *, rows: int) -> list[dict[str, Any]]:
    from test_megatron import draw_micro_batches

    return draw_micro_batches(f"example {rank} {step}", 2, rows=rows)


def run_megatron_lm() -> tuple[Writer, list]:
    """On a rank: four iterations, the third of them skipped, and an evaluation, through the patched functions."""
    import torch
    from harness import gpt, upstream
    from test_megatron import loss_func_three

    upstream.initialize_parallel()
    writer, lines, documents = Writer(), [], []
    rank = torch.distributed.get_rank()
    model = gpt.build_model()

    skipped = draw(rank, 3, rows=3)
    current: dict[str, Any] = {}

    def train_step(forward_step_func, data_iterator, *_):
        gpt.run_schedule(model, forward_step_func, data_iterator)
        return {}, int(data_iterator is skipped), False, False, 0, 0.0, 0

    def training_log(
        loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter
    ):
        return report_memory_flag

    def evaluate_and_print_results(prefix, forward_step_func, data_iterator, model, iteration):
        [chunk] = model
        with torch.no_grad():
            gpt.run_schedule(chunk, forward_step_func, data_iterator, forward_only=True)

    training = {
        "train_step": train_step, "training_log": training_log, "evaluate_and_print_results": evaluate_and_print_results
    }  # fmt: skip
    modules(megatron__training__training=training)
    modules(
        megatron__training={
            "training": sys.modules["megatron.training.training"], "get_args": lambda: SimpleNamespace(log_interval=2),
            "get_tensorboard_writer": lambda: writer, "get_wandb_writer": lambda: writer,
            "print_rank_last": lines.append,
        }
    )  # fmt: skip

    def get_batch(iterator):
        batch = current["batch"] = next(iterator)
        positions, attention_mask = gpt.dense_inputs(batch)
        return batch["tokens"], batch["labels"], batch["loss_mask"], attention_mask, positions, None, batch["channels"]

    def loss_func(loss_mask, output_tensor, model=None):
        documents.append((current["batch"], output_tensor.detach().clone()))
        return loss_func_three(loss_mask, output_tensor)

    example = runpy.run_path(
        str(ROOT / "examples" / "megatron_lm.py"), init_globals={"get_batch": get_batch, "loss_func": loss_func}
    )
    patched = sys.modules["megatron.training.training"]
    for iteration in (1, 2, 3, 4):
        data = skipped if iteration == 3 else draw(rank, iteration, rows=3)
        result = patched.train_step(example["forward_step"], data, [model], None, None, None)
        patched.training_log({}, {}, 0.1, iteration, 1.0, True, result[1])
    patched.evaluate_and_print_results("", example["forward_step"], draw(rank, 5, rows=3), [model], 4)
    return writer, lines, documents


def means(documents: list, prefix: str) -> dict[str, float]:
    from test_megatron import document_loop

    return {f"{prefix}{k}": s / n for k, (s, n) in document_loop(documents).items()}


@pytest.mark.filterwarnings("ignore:.*outside the vocabulary")
def test_megatron_lm(pools):
    ranks = pools(2).run(run_megatron_lm)
    # Two micro-batches an iteration; the third iteration was skipped, the fifth was the evaluation.
    intervals = {
        (2, "loss_"): [d for _, _, docs in ranks for d in docs[0:4]],
        (4, "loss_"): [d for _, _, docs in ranks for d in docs[6:8]],
        (4, "eval_loss_"): [d for _, _, docs in ranks for d in docs[8:10]],
    }
    for writer, lines, documents in ranks:
        assert len(documents) == 10
        expected = {
            (name, step): mean for (step, prefix), d in intervals.items() for name, mean in means(d, prefix).items()
        }
        assert writer.scalars == pytest.approx(expected, rel=1e-6)
        assert {(k, step): v for step, values in writer.logged.items() for k, v in values.items()} == writer.scalars
        assert [line.split("|")[0] for line in lines] == [" iteration 2 ", " iteration 4 "]


def run_megatron_bridge() -> tuple[Writer, list]:
    """On a rank: three steps, the second skipped, and an evaluation."""
    from functools import partial

    import torch
    from harness import gpt, upstream
    from test_megatron import loss_func_three

    upstream.initialize_parallel()
    writer, documents = Writer(), []
    rank = torch.distributed.get_rank()
    model = gpt.build_model()

    def bridge_forward_step(state, data_iterator, model, return_schedule_plan=False):
        batch = {k: v for k, v in next(data_iterator).items() if k != "channels"}
        return None, partial(loss_func_three, batch["loss_mask"])

    modules(
        megatron__bridge={},
        megatron__bridge__training__gpt_step={"forward_step": bridge_forward_step},
        megatron__bridge__training__callbacks={"Callback": object},
    )
    modules(megatron__bridge__training={"gpt_step": sys.modules["megatron.bridge.training.gpt_step"]})
    example = runpy.run_path(str(ROOT / "examples" / "megatron_bridge.py"))
    callback = example["ChannelLosses"]()
    state = SimpleNamespace(
        train_state=SimpleNamespace(step=0), cfg=SimpleNamespace(logger=SimpleNamespace(log_interval=3)),
        tensorboard_logger=writer, wandb_logger=writer,
    )  # fmt: skip

    def make_loss_func(batch):
        _, loss_func = example["forward_step"](state, iter([batch]), model)

        def record(losses):
            documents.append((batch, losses.detach().clone()))
            return loss_func(losses)

        return record

    for step in range(3):
        callback.on_train_step_start(SimpleNamespace(state=state))
        gpt.run_iteration(model, draw(rank, step, rows=1), make_loss_func)
        callback.on_train_step_end(SimpleNamespace(state=state, skipped_iter=step == 1))
        state.train_state.step += 1
    with torch.no_grad():
        gpt.run_iteration(model, draw(rank, 9, rows=1), make_loss_func, forward_only=True)
    callback.on_eval_end(SimpleNamespace(state=state))
    return writer, documents


@pytest.mark.filterwarnings("ignore:.*outside the vocabulary")
def test_megatron_bridge(pools):
    ranks = pools(2).run(run_megatron_bridge)
    train = means([d for _, docs in ranks for d in docs[:2] + docs[4:6]], "loss_")
    evaluation = means([d for _, docs in ranks for d in docs[6:]], "eval_loss_")
    for writer, _ in ranks:
        assert writer.logged == {3: pytest.approx({**train, **evaluation}, rel=1e-6)}


def test_ms_swift():
    """The shell script hands its options on; the plugin file installs a fixed vocabulary."""
    result = subprocess.run(
        [str(ROOT / "examples" / "ms_swift.sh"), "echo", "megatron", "sft", "--packing", "true"],
        capture_output=True, text=True, timeout=300, env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )  # fmt: skip
    words = result.stdout.split()
    assert words[:7] == ["megatron", "sft", "--packing", "true", "--enable_channel_loss", "true", "--external_plugins"]
    assert Path(words[7]).is_file()
    code = (
        f"import runpy; runpy.run_path({str(ROOT / 'examples' / 'ms_swift_plugin.py')!r})\n"
        "from segscatter.swift import _trackers; print(_trackers._vocabulary)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout == "('code', 'math', 'web')\n", result.stderr


def test_hf_trainer(tmp_path):
    """Runs as a user would run it; the means are in the printed log and in the TensorBoard files."""
    script = ROOT / "examples" / "hf_trainer.py"
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=300, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    logged = [ast.literal_eval(line) for line in result.stdout.splitlines() if line.startswith("{")]
    train = [entry for entry in logged if "learning_rate" in entry]
    assert train
    assert all({"loss_code", "loss_math", "loss_web", "loss_None"} & entry.keys() for entry in train)
    assert any("eval_loss_code" in entry for entry in logged)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(next(tmp_path.glob("runs/*"))))
    events.Reload()
    assert {"train/loss_code", "eval/loss_code"} <= set(events.Tags()["scalars"])
