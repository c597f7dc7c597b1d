# SPDX-License-Identifier: Apache-2.0
"""Channel losses in Hugging Face's ``Trainer``, with packed and with padded batches.

Put :class:`ChannelLossMixin` in front of the trainer class and :class:`ChannelCollator` around the data collator::

    class MyTrainer(ChannelLossMixin, Trainer):
        pass

    collator = ChannelCollator(DataCollatorWithFlattening(return_flash_attn_kwargs=True))
    trainer = MyTrainer(..., data_collator=collator, channel_registry=ChannelRegistry(["code", "math", "web"]))

with ``remove_unused_columns=False``, so that the column of channels reaches the collator. The means join what
``Trainer.log`` gets, as ``loss_<channel>``, and the metrics of an evaluation, as ``eval_loss_<channel>``.

Nothing here imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .channels import ChannelRegistry
from .tracker import ChannelLossTracker

__all__ = ["ChannelCollator", "ChannelLossMixin", "offsets_from_position_ids", "token_losses"]

_IGNORE_INDEX = -100
_LOGITS_PER_CHUNK = 1 << 26  # 256 MB in float32


class ChannelCollator:
    """A data collator that keeps the channel of every example, as ``batch[key]``: a list, or ids if there is a
    registry.

    collator: makes the batch from the examples without their channels.
    registry: a fixed one encodes in the dataloader worker, so that only an integer tensor crosses over.
    key: of the channel in an example (may be missing: no channel) and in the batch.
    """

    def __init__(
        self, collator: Callable[[list[dict]], dict], registry: ChannelRegistry | None = None, key: str = "channel"
    ) -> None:
        if registry is not None and registry.grow:
            raise ValueError("registry must be fixed: one that grows cannot encode in a dataloader worker")
        self.collator = collator
        self.registry = registry
        self.key = key

    def __call__(self, examples: list[Mapping[str, Any]]) -> dict[str, Any]:
        channels = [example.get(self.key) for example in examples]
        batch = self.collator([{k: v for k, v in example.items() if k != self.key} for example in examples])
        batch[self.key] = channels if self.registry is None else self.registry.encode(channels)
        return batch


class ChannelLossMixin:
    """Counts the loss of every channel in a ``transformers.Trainer``; stands in front of it in the bases.

    channel_registry: the channels. Default: a growing registry, which takes names as they come.
    channel_key: of the channels in a batch: one for every document, names or ids.

    The training loss is the one that the trainer computes; token losses are taken from ``outputs.logits`` once more,
    without gradients. Override :meth:`channel_token_losses` where your model gives them cheaper.
    """

    def __init__(
        self, *args: Any, channel_registry: ChannelRegistry | None = None, channel_key: str = "channel", **kwargs: Any
    ) -> None:
        registry = ChannelRegistry(grow=True) if channel_registry is None else channel_registry
        self.channel_losses = ChannelLossTracker(registry)
        self.channel_key = channel_key
        super().__init__(*args, **kwargs)

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        inputs = dict(inputs)
        channels = inputs.pop(self.channel_key, None)
        labels = inputs.get("labels")
        loss, outputs = super().compute_loss(model, inputs, True, *args, **kwargs)
        if labels is not None:
            with torch.no_grad():
                losses, mask = self.channel_token_losses(outputs, labels)
            self._track(losses, mask, channels, inputs, "train" if model.training else "eval")
        return (loss, outputs) if return_outputs else loss

    def channel_token_losses(self, outputs: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
        """``[B, S]`` losses, at the place of the token that predicts, and the ``[B, S]`` mask of those that count."""
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs.logits
        targets = F.pad(labels, (0, 1), value=_IGNORE_INDEX)[..., 1:]
        return token_losses(logits, targets), targets != _IGNORE_INDEX

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # the periodic log of training, which every process reaches
            logs.update(self._means("train", "loss_"))
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
        output.metrics.update(self._means("eval", f"{prefix}_loss_"))
        return output

    def _means(self, mode: str, prefix: str) -> dict[str, float]:
        return {f"{prefix}{name}": stat.mean for name, stat in self.channel_losses.reduce(mode).items()}

    def _track(self, losses: Tensor, mask: Tensor, channels: Any, inputs: Mapping[str, Any], mode: str) -> None:
        rows = losses.shape[0]
        cu_seqlens = inputs.get("cu_seq_lens_q")
        if channels is None:
            channels, cu_seqlens = [None] * rows, None
        elif cu_seqlens is None and len(channels) != rows:
            position_ids = inputs.get("position_ids")
            if rows != 1 or position_ids is None:
                raise ValueError(
                    f"there are {len(channels)} channels for {rows} rows; a packed batch needs cu_seq_lens_q, or "
                    f"one row and position_ids"
                )
            cu_seqlens = offsets_from_position_ids(position_ids, len(channels))
        self.channel_losses.update(losses, mask, channels, cu_seqlens=cu_seqlens, mode=mode)


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of every token: float32, of the shape of ``targets``; 0 where the target is -100.

    logits: ``[..., V]``. Works on pieces, so that no float32 copy of all logits is made.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    chunk = max(1, _LOGITS_PER_CHUNK // max(1, logits.shape[-1]))
    pieces = [
        F.cross_entropy(part.float(), target, ignore_index=_IGNORE_INDEX, reduction="none")
        for part, target in zip(flat.split(chunk), targets.reshape(-1).split(chunk), strict=True)
    ]
    return torch.cat(pieces).view(targets.shape)


def offsets_from_position_ids(position_ids: Tensor, num_documents: int) -> Tensor:
    """``[num_documents + 1]`` int64 offsets of packed documents, each of which begins with position 0.

    Their number comes from the host, so the device is not waited for. The last offset is where the next document would
    begin, or the number of tokens.
    """
    document = (position_ids.flatten() == 0).cumsum(0)  # of every token, from 1
    return torch.searchsorted(document, torch.arange(1, num_documents + 2, device=position_ids.device))
