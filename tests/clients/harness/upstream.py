# SPDX-License-Identifier: Apache-2.0
"""Makes the installed Megatron-Core and ms-swift importable and runnable without a GPU.

Four things are replaced, and nothing else: the ``mcore_bridge`` package shell (its ``__init__`` needs
TransformerEngine; its ``utils`` and ``config`` stay real), ``torch.cuda.current_device``, factory calls with
``device="cuda"``, and the CUDA random-number tracker's ``fork``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class CudaFactoriesOnCpu(TorchFunctionMode):
    """Sends ``device="cuda"`` of factory functions to the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if isinstance(device, str | torch.device) and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": "cpu"}
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


@cache
def stub() -> None:
    """Replaces what needs a GPU or TransformerEngine. Once per process, before the trainers are imported."""
    spec = importlib.util.find_spec("mcore_bridge")
    shell = types.ModuleType("mcore_bridge")
    shell.__path__ = list(spec.submodule_search_locations)
    shell.__spec__ = spec
    sys.modules["mcore_bridge"] = shell
    from mcore_bridge.config import ModelConfig, hf_to_mcore_config
    from mcore_bridge.utils import set_random_seed, split_cp_inputs, unwrap_model

    shell.ModelConfig, shell.hf_to_mcore_config = ModelConfig, hf_to_mcore_config
    shell.set_random_seed, shell.split_cp_inputs, shell.unwrap_model = set_random_seed, split_cp_inputs, unwrap_model
    for name in ("LoraParallelLinear", "GPTBridge"):
        setattr(shell, name, type(name, (), {}))
    shell.get_mcore_model = None
    torch.cuda.current_device = lambda: torch.device("cpu")
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()


def initialize_parallel(*, tp: int = 1, cp: int = 1) -> None:
    """Megatron's process groups over all ranks of the pool; replaces those of the previous test."""
    stub()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)


class LossTable(nn.Module):
    """Stands for the model of a Megatron trainer: the loss of a token is looked up by its input id."""

    def __init__(self, losses: Tensor, config: Any) -> None:
        super().__init__()
        self.table = nn.Parameter(losses.clone())
        self.config = config
        self.vp_stage = None
        self.model_type = None

    def set_input_tensor(self, _: Any) -> None: ...

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        return self.table[input_ids]


def megatron_config(**options: Any) -> Any:
    """A config for the schedule with the per-token loss, which ms-swift uses too."""
    from megatron.core.transformer import TransformerConfig

    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    return TransformerConfig(**{**sizes, "calculate_per_token_loss": True, **options})


@dataclass(frozen=True)
class Trainers:
    """ms-swift's trainer classes; index 0: as they are, 1: with our plugin, loaded as ms-swift loads it."""

    megatron: tuple[type, type]
    seq2seq: tuple[type, type]


@cache
def trainers() -> Trainers:
    stub()
    from segscatter.swift import plugin_path
    from swift.megatron.trainers.trainer import MegatronTrainer
    from swift.trainers.seq2seq_trainer import Seq2SeqTrainer
    from swift.utils import import_external_file

    originals = [
        type("Original", (cls,), {name: getattr(cls, name) for name in names})
        for cls, names in (
            (MegatronTrainer, ("_compute_channel_loss", "_log_callback")),
            (Seq2SeqTrainer, ("compute_loss", "log")),
        )
    ]
    import_external_file(plugin_path())
    return Trainers((originals[0], MegatronTrainer), (originals[1], Seq2SeqTrainer))


def megatron_trainer(
    losses: Tensor,
    *,
    ours: bool,
    padding_free: bool = True,
    cp_partition_mode: str = "zigzag",
    num_microbatches: int = 1,
) -> Any:
    """A real ``MegatronTrainer`` around a :class:`LossTable`; only its constructor does not run."""
    cls = trainers().megatron[ours]
    trainer = cls.__new__(cls)
    from megatron.core import parallel_state

    trainer.args = SimpleNamespace(
        task_type="causal_lm", padding_free=padding_free, enable_channel_loss=True, enable_dft_loss=False,
        context_parallel_size=parallel_state.get_context_parallel_world_size(), pipeline_model_parallel_size=1,
        cp_partition_mode=cp_partition_mode, num_microbatches=num_microbatches, seq_length=losses.numel(),
        micro_batch_size=1, mtp_num_layers=None, dsa_indexer_loss_coeff=None, is_multimodal=False,
        attention_backend="flash", eval_iters=1,
    )  # fmt: skip
    trainer.config = megatron_config()
    trainer.state = SimpleNamespace(iteration=1)
    trainer.callbacks = []
    trainer.eval_metrics = None
    model = LossTable(losses, trainer.config)
    trainer.wrapped_models = trainer.unwrapped_models = [model]
    trainer._train_metrics = {}
    return trainer


def forward_backward(trainer: Any, micro_batches: list[dict[str, Any]]) -> list[dict]:
    """The forward and backward passes of one iteration; returns the metrics of every micro-batch."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    with CudaFactoriesOnCpu():
        return forward_backward_no_pipelining(
            forward_step_func=trainer.forward_step,
            data_iterator=iter(micro_batches),
            model=trainer.wrapped_models,
            num_microbatches=len(micro_batches),
            seq_length=trainer.args.seq_length,
            micro_batch_size=trainer.args.micro_batch_size,
        )


def evaluate(trainer: Any, micro_batches: list[dict[str, Any]]) -> dict[str, float]:
    """The trainer's own ``evaluate``; returns what it logged."""
    with CudaFactoriesOnCpu():
        trainer.evaluate(iter(micro_batches))
    for model in trainer.wrapped_models:
        model.train()
    return trainer._last_logged_metrics
