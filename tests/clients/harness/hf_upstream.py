# SPDX-License-Identifier: Apache-2.0
"""ms-swift's real ``Seq2SeqTrainer``, made without its constructor, around a table of logits."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from .upstream import trainers

VOCABULARY = 11


class LogitsTable(nn.Module):
    """The logits of a token are looked up by its input id."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(logits.clone())
        self.model_info = SimpleNamespace(is_moe_model=False)

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.table[input_ids], loss=None)


def seq2seq_trainer(logits: Tensor, *, ours: bool, padding_free: bool) -> Any:
    from swift.metrics import MeanMetric
    from transformers.trainer_callback import TrainerControl, TrainerState

    cls = trainers().seq2seq[ours]
    trainer = cls.__new__(cls)
    trainer.model = LogitsTable(logits)
    trainer.args = SimpleNamespace(
        enable_channel_loss=True, enable_dft_loss=False, use_liger_kernel=False, router_aux_loss_coef=None,
        average_tokens_across_devices=False, tuner_backend="unsloth", past_index=-1, include_num_input_tokens_seen="no",
    )  # fmt: skip
    trainer.template = SimpleNamespace(
        sequence_parallel_size=1,
        padding_free=padding_free,
        compute_sft_loss=lambda model, inputs, **_: model(inputs["input_ids"]),
    )
    trainer.label_smoother = None
    trainer.accelerator = SimpleNamespace(unwrap_model=lambda model: model, num_processes=1)
    trainer.model_accepts_loss_kwargs = True
    trainer.custom_metrics = {
        mode: collections.defaultdict(lambda: MeanMetric(nan_value=None, device="cpu")) for mode in ("train", "eval")
    }
    trainer.state = TrainerState()
    trainer.control = TrainerControl()
    trainer.callback_handler = SimpleNamespace(on_log=lambda args, state, control, logs: control)
    return trainer
