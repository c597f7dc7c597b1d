# SPDX-License-Identifier: Apache-2.0
"""``megatron sft``: MegatronTrainer feeds a tracker in every micro-batch and reduces it when it logs.

Upstream's ``_compute_channel_loss`` returns metrics, reduced over data and context parallelism for every micro-batch.
Here it returns none; the means join the logs in ``_log_callback``, which all ranks of the last pipeline stage reach
together (upstream reduces the training loss there).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import Tensor

from ..megatron import data_parallel_group
from ..ops import ContextParallel
from ._trackers import metrics_since_last_log, tracker_of
from ._upstream import require_own, require_parameters

MODULE = "swift.megatron.trainers.trainer"


def patch(module: ModuleType) -> None:
    """Patches ``MegatronTrainer`` of ``module``. Raises RuntimeError when it is not as expected."""
    trainer = module.MegatronTrainer
    if getattr(trainer, "_segscatter", False):
        return
    compute = require_own(trainer, "_compute_channel_loss")
    log = require_own(trainer, "_log_callback")
    require_parameters(compute, "self", "losses", "loss_mask", "channels", "packed_seq_params")
    require_parameters(log, "self", "logs", "n_steps")
    trainer._compute_channel_loss = functools.wraps(compute)(_compute_channel_loss)
    trainer._log_callback = _with_channel_losses(log)
    trainer._segscatter = True


def _compute_channel_loss(
    self: Any, losses: Tensor, loss_mask: Tensor, channels: list | None, packed_seq_params: Any = None
) -> dict[str, Tensor]:
    packed = self.args.padding_free
    documents = packed_seq_params.seq_lens.shape[0] if packed else losses.shape[0]  # the segments behind are padding
    if channels is None:
        channels = [None] * documents
    if len(channels) != documents:
        raise ValueError(f"there are {len(channels)} channels for {documents} documents")
    tracker_of(self, data_parallel_group).update(
        losses,
        loss_mask,
        channels,
        cu_seqlens=packed_seq_params.cu_seqlens_q if packed else None,
        cp=_context_parallel(self.args) if packed else None,
        mode=_mode(self),
    )
    return {}


def _with_channel_losses(log: Any) -> Any:
    @functools.wraps(log)
    def _log_callback(self: Any, logs: dict[str, Any], n_steps: int) -> None:
        if self.args.enable_channel_loss and self.args.task_type == "causal_lm" and _is_last_stage():
            logs.update(metrics_since_last_log(tracker_of(self, data_parallel_group), _mode(self)))
        log(self, logs, n_steps)

    return _log_callback


def _mode(trainer: Any) -> str:
    return "train" if trainer.unwrapped_models[0].training else "eval"


def _context_parallel(args: Any) -> ContextParallel | None:
    if args.context_parallel_size == 1:
        return None
    from megatron.core import mpu

    layout = "contiguous" if getattr(args, "cp_partition_mode", "zigzag") == "contiguous" else "per_document"
    return ContextParallel(layout, args.context_parallel_size, mpu.get_context_parallel_rank())


def _is_last_stage() -> bool:
    from megatron.core import mpu

    return mpu.is_pipeline_last_stage(ignore_virtual=True)
