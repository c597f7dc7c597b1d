# SPDX-License-Identifier: Apache-2.0
"""Installing the plugin: cheap, at any time, only where it fits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FAKE_TRAINER = """
class MegatronTrainer:
    def _compute_channel_loss(self, losses, loss_mask, channels, packed_seq_params=None{more}):
        return {{}}

    def _log_callback(self, logs, n_steps):
        pass
"""
FAKE_SEQ2SEQ = """
class Mixin:
    def get_cu_seqlens(self, position_ids, logits_to_keep):
        pass

    def log(self, logs, *args, **kwargs):
        pass


class Seq2SeqTrainer(Mixin):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self.args.enable_channel_loss:
            cu_seqlens = self.get_cu_seqlens(text_position_ids, inputs.get('logits_to_keep'))
            for i in range(cu_seqlens.shape[0] - 1):
                channel = None if channels is None else channels[i]
                slice_ = slice(cu_seqlens[i], cu_seqlens[i + 1])
                metrics[f'loss_{channel}'].update(channel_loss[slice_][masks[slice_]]{more})
"""


def python(code: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess:
    """Runs ``code`` in a new interpreter that looks for modules in ``paths`` first."""
    env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)


@pytest.fixture
def fake_swift(tmp_path):
    """A package ``swift`` with trainers of the right names; ``more`` goes into what the plugin looks at."""

    def make(more: str = "") -> Path:
        for folder in ("swift", "swift/trainers", "swift/megatron", "swift/megatron/trainers"):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / "__init__.py").write_text("")
        (tmp_path / "swift/megatron/trainers/trainer.py").write_text(FAKE_TRAINER.format(more=more))
        (tmp_path / "swift/trainers/seq2seq_trainer.py").write_text(FAKE_SEQ2SEQ.replace("{more}", more))
        return tmp_path

    return make


def test_the_command_prints_the_plugin():
    result = subprocess.run([sys.executable, "-m", "segscatter.swift"], capture_output=True, text=True, timeout=300)
    path = Path(result.stdout.strip())
    assert path.name == "segscatter_channel_loss.py"
    assert "install()" in path.read_text()
    # ms-swift puts the folder first on sys.path, so nothing else may lie there to hide other modules.
    assert {p.name for p in path.parent.iterdir()} - {"__pycache__"} == {path.name}


def test_a_dataloader_worker_can_afford_the_import():
    """No trainer is imported, no group made, no CUDA started, no thread left."""
    code = """
import sys, threading, torch
torch.cuda.init = torch.cuda._lazy_init = None  # calling it fails
from segscatter.swift import plugin_path
exec(open(plugin_path()).read())
heavy = [m for m in ("swift", "megatron", "transformers", "datasets") if m in sys.modules]
print(heavy, torch.distributed.is_initialized(), torch.cuda.is_initialized(), threading.active_count())
"""
    result = python(code)
    assert result.stdout.split("\n")[0] == "[] False False 1", result.stderr


@pytest.mark.parametrize("first", ["install", "trainer"])
def test_trainers_are_patched_whenever_they_are_imported(fake_swift, first):
    steps = {
        "install": "from segscatter.swift import install; install(); install()",
        "trainer": "from swift.megatron.trainers.trainer import MegatronTrainer; "
        "from swift.trainers.seq2seq_trainer import Seq2SeqTrainer",
    }
    order = sorted(steps, key=lambda name: name != first)
    code = "\n".join(
        [*(steps[name] for name in order), "print(MegatronTrainer._segscatter, Seq2SeqTrainer._segscatter)"]
    )
    result = python(code, fake_swift())
    assert result.stdout == "True True\n", result.stderr


def test_a_trainer_of_another_signature_is_refused(fake_swift):
    code = "from segscatter.swift import install; install(); import swift.megatron.trainers.trainer"
    result = python(code, fake_swift(", group=None"))
    assert result.returncode == 1
    assert "segscatter.swift does not fit ms-swift" in result.stderr
    assert (
        "MegatronTrainer._compute_channel_loss has the parameters (self, losses, loss_mask, channels, " in result.stderr
    )
    assert "packed_seq_params, group), not (self, losses, loss_mask, channels, packed_seq_params)" in result.stderr


def test_another_loop_is_refused(fake_swift):
    code = "import swift.trainers.seq2seq_trainer\nfrom segscatter.swift import install\ninstall()"
    result = python(code, fake_swift(", 1"))
    assert result.returncode == 1
    assert "Seq2SeqTrainer.compute_loss has 0 times the loop over documents that is to be replaced" in result.stderr


def fixed_vocabulary_logs(names: list[str]) -> dict[str, float]:
    """On a rank: what a trainer logs after ``install(channels=names)``."""
    import torch
    from harness import upstream
    from segscatter.swift import install

    upstream.initialize_parallel()
    upstream.trainers()
    install(channels=names)
    try:
        trainer = upstream.megatron_trainer(torch.zeros(1), ours=True, padding_free=False)
        mask = torch.ones(3, 2, dtype=torch.bool)
        trainer._compute_channel_loss(torch.arange(6.0).view(3, 2), mask, ["code", None, "unheard of"])
        trainer.on_log({"n_steps": 1})
        return trainer._last_logged_metrics
    finally:
        install()


@pytest.mark.filterwarnings("ignore:.*outside the vocabulary")
def test_fixed_vocabulary(pools):
    [logged] = pools(1).run(fixed_vocabulary_logs, ["math", "code"])
    assert logged == {"loss_code": 0.5, "loss_None": 2.5, "loss_other": 4.5}


def test_vocabulary_file(tmp_path):
    (tmp_path / "channels.txt").write_text("code\n数学\n", encoding="utf-8")
    code = """
from segscatter.swift import install, _trackers
install()
print([*_trackers.tracker_of(type("Trainer", (), {})()).registry.names])
"""
    result = python(code, SEGSCATTER_CHANNELS=str(tmp_path / "channels.txt"), PYTHONIOENCODING="utf-8")
    assert result.stdout == "['code', '数学', 'None', 'other']\n", result.stderr


def test_both_kinds_of_vocabulary_are_refused():
    from segscatter.swift import install

    with pytest.raises(ValueError, match="exclude each other"):
        install(channels=["a"], vocabulary_file="b")
