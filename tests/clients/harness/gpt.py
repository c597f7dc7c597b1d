# SPDX-License-Identifier: Apache-2.0
"""A tiny real GPTModel under Megatron-Core's own data parallelism and schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .upstream import CudaFactoriesOnCpu, megatron_config

VOCABULARY = 32
SEQUENCE = 16


def build_model(*, per_token_loss: bool = True) -> Any:
    """The same weights at every call and on every data-parallel rank."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(5)
    config = megatron_config(
        num_layers=2, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, attention_dropout=0.0,
        hidden_dropout=0.0, calculate_per_token_loss=per_token_loss,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )  # fmt: skip
    config.finalize_model_grads_func = finalize_model_grads
    with CudaFactoriesOnCpu():
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)
        return DistributedDataParallel(config, DistributedDataParallelConfig(), model)


def dense_inputs(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Position ids and the causal attention mask."""
    length = batch["tokens"].shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return torch.arange(length)[None].expand_as(batch["tokens"]), mask


def run_schedule(
    model: Any, forward_step: Callable[..., Any], micro_batches: list[dict[str, Any]], *, forward_only: bool = False
) -> tuple[list[Any], list[Tensor]]:
    """Forward and backward passes through the real schedule; what it collected, and the gradients."""
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    model.zero_grad_buffer()
    with CudaFactoriesOnCpu():
        collected = forward_backward_no_pipelining(
            forward_step_func=forward_step, data_iterator=iter(micro_batches), model=[model],
            num_microbatches=len(micro_batches), seq_length=SEQUENCE, micro_batch_size=1, forward_only=forward_only,
        )  # fmt: skip
    return collected, [p.main_grad.clone() for p in model.parameters()]


def run_iteration(
    model: Any,
    micro_batches: list[dict[str, Any]],
    make_loss_func: Callable[[dict[str, Any]], Callable],
    *,
    forward_only: bool = False,
) -> tuple[list[Any], list[Tensor]]:
    """:func:`run_schedule` on batches with ``tokens`` and ``labels``, ``[B, S]``, each with its own loss function."""

    def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Callable]:
        batch = next(iterator)
        return model(batch["tokens"], *dense_inputs(batch), labels=batch["labels"]), make_loss_func(batch)

    return run_schedule(model, forward_step, micro_batches, forward_only=forward_only)
