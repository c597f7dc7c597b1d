# SPDX-License-Identifier: Apache-2.0
"""``swift sft``: Seq2SeqTrainer feeds a tracker in place of its loop over documents, and reduces it when it logs.

The loop stands in the middle of the long ``compute_loss``. So that the rest of it stays the installed code, two
statements of its syntax tree are replaced, and only where they read exactly as known here: the call that finds the
documents' boundaries (it reads their number from the device), and the loop.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..hf import offsets_from_position_ids
from ._trackers import metrics_since_last_log, tracker_of
from ._upstream import refuse, require_own, require_parameters

MODULE = "swift.trainers.seq2seq_trainer"

_BOUNDARIES = "cu_seqlens = self.get_cu_seqlens(text_position_ids, inputs.get('logits_to_keep'))"
_LOOP = """
for i in range(cu_seqlens.shape[0] - 1):
    channel = None if channels is None else channels[i]
    slice_ = slice(cu_seqlens[i], cu_seqlens[i + 1])
    metrics[f'loss_{channel}'].update(channel_loss[slice_][masks[slice_]])
"""
_OUR_BOUNDARIES = "cu_seqlens = _segscatter_boundaries(text_position_ids, inputs.get('logits_to_keep'), channels)"
_OUR_UPDATE = "_segscatter_update(self, mode, channel_loss, masks, channels, cu_seqlens)"


def patch(module: ModuleType) -> None:
    """Patches ``Seq2SeqTrainer`` of ``module``. Raises RuntimeError when it is not as expected."""
    trainer = module.Seq2SeqTrainer
    if getattr(trainer, "_segscatter", False):
        return
    compute_loss = require_own(trainer, "compute_loss")
    require_parameters(compute_loss, "self", "model", "inputs", "return_outputs", "num_items_in_batch")
    require_parameters(trainer.get_cu_seqlens, "self", "position_ids", "logits_to_keep")
    require_parameters(trainer.log, "self", "logs", "args", "kwargs")
    replaced = _replace_statements(compute_loss)
    module._segscatter_boundaries = _boundaries
    module._segscatter_update = _update
    trainer.compute_loss = replaced
    trainer.log = _with_channel_losses(trainer.log)
    trainer._segscatter = True


def _update(
    trainer: Any, mode: str, losses: Tensor, mask: Tensor, channels: list | None, cu_seqlens: Tensor | None
) -> None:
    if channels is None or cu_seqlens is None:
        channels, cu_seqlens = [None], [0, losses.numel()]
    tracker_of(trainer).update(losses, mask, channels, cu_seqlens=cu_seqlens, mode=mode)


def _boundaries(position_ids: Tensor, logits_to_keep: Tensor | int | None, channels: list | None) -> Tensor | None:
    """``[N + 1]`` offsets of the N documents, as ``get_cu_seqlens`` finds them. N comes from ``channels``, so that no
    device data is read. None: without channels, the boundaries do not matter."""
    if channels is None:
        return None
    cu_seqlens = offsets_from_position_ids(position_ids, len(channels))
    if isinstance(logits_to_keep, Tensor):
        return torch.nn.functional.pad(logits_to_keep.long().cumsum(0), (1, 0))[cu_seqlens]
    if isinstance(logits_to_keep, int):
        cu_seqlens[1:] -= position_ids.shape[-1] + 1 - logits_to_keep
    return cu_seqlens


def _with_channel_losses(log: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(log)
    def log_with_channel_losses(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if self.args.enable_channel_loss:
            training = self.model.training
            metrics = metrics_since_last_log(tracker_of(self), "train" if training else "eval")
            prefix = "" if training else "eval_"
            logs.update({f"{prefix}{name}": mean for name, mean in metrics.items()})
        return log(self, logs, *args, **kwargs)

    return log_with_channel_losses


def _replace_statements(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the boundaries of the channel-loss branch and its loop replaced; lines and globals stay."""
    if function.__closure__ or hasattr(function, "__wrapped__"):
        raise refuse(f"{function.__qualname__} is no plain function; another plugin may have wrapped it")
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError as error:
        raise refuse(f"the source of {function.__qualname__} is not to be had ({error})") from error
    tree = ast.parse(textwrap.dedent("".join(lines)))
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _is_channel_branch(node)]
    if len(branches) != 1:
        raise refuse(
            f"{function.__qualname__} has {len(branches)} times the loop over documents that is to be replaced"
        )
    replacer = _Replacer()
    replacer.visit(branches[0])
    if replacer.count != 2:
        raise refuse(f"{function.__qualname__} does not find the boundaries of documents as expected")
    ast.increment_lineno(tree, first - 1)
    namespace: dict[str, Any] = {}
    exec(compile(tree, inspect.getsourcefile(function), "exec"), function.__globals__, namespace)
    return functools.wraps(function, updated=())(namespace[function.__name__])


def _text(statement: str) -> str:
    return ast.unparse(ast.parse(statement))


def _is_channel_branch(node: ast.If) -> bool:
    return any(ast.unparse(statement) == _text(_LOOP) for statement in node.body)


class _Replacer(ast.NodeTransformer):
    _NEW = {_text(_BOUNDARIES): _OUR_BOUNDARIES, _text(_LOOP): _OUR_UPDATE}  # noqa: RUF012

    def __init__(self) -> None:
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        new = self._NEW.get(ast.unparse(node)) if isinstance(node, ast.Assign | ast.For) else None
        if new is None:
            return self.generic_visit(node)
        self.count += 1
        statement = ast.copy_location(ast.parse(new).body[0], node)
        for child in ast.walk(statement):
            ast.copy_location(child, node)
        return statement
