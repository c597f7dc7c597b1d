# SPDX-License-Identifier: Apache-2.0
"""Channel losses in Megatron-LM, Megatron-Bridge and other trainers on the Megatron-Core schedules.

:func:`wrap_loss_func` goes around the loss function that ``forward_step`` returns, :func:`log_channel_losses` into the
training log. Nothing here imports Megatron before it is needed.

Which ranks count: the losses of a micro-batch are the same on all tensor-parallel ranks, and only the last pipeline
stage has any. So a tracker sums over data x context parallelism (:func:`data_parallel_group`), and every
tensor-parallel rank comes to the same numbers. Where only tensor-parallel rank 0 knows the channels, because the data
pipeline does not broadcast them, wrap the loss function on that rank alone and give the tracker
:func:`tensor_and_data_parallel_group`: the other ranks then add nothing and get the result.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ops import ContextParallel, segment_scatter_reduce
from .tracker import ChannelLossTracker, ChannelStat

__all__ = [
    "BatchTap",
    "channel_means",
    "context_parallel",
    "data_parallel_group",
    "log_channel_losses",
    "tensor_and_data_parallel_group",
    "wrap_loss_func",
    "wrap_train_step",
    "wrap_training_log",
]

_FRACTIONAL = (None, "tokens", "weights")
_REPORTS = (None, "keys")


def wrap_loss_func(
    loss_func: Callable[..., Any],
    tracker: ChannelLossTracker,
    channels: Tensor | Iterable[object] | None,
    *,
    loss_mask: Tensor | None = None,
    packed_seq_params: Any = None,
    cp: ContextParallel | None = None,
    ignore_index: int = 0,
    fractional_mask: str | None = None,
    mode: str | None = None,
    report: str | None = None,
    prefix: str = "loss_",
) -> Callable[..., Any]:
    """``loss_func``, which also feeds the token losses of its micro-batch to ``tracker``.

    What ``loss_func`` returns is passed on: the very loss and token-count tensors, in a tuple of the same length, so
    that training is bit for bit the same. There is no collective and no host sync.

    loss_func: called with the model's token losses, as ``forward_step`` returns it. Any of Megatron's forms: ``(loss,
        num_tokens, report)`` and ``(loss, report)``, reports of ``[sum, count]`` tensors or of ``(sum, count)`` tuples.
    channels: of every segment: names, or ids from ``tracker.registry.encode`` (a tensor). Fewer than segments: the rest
        is padding. None: no segment has a channel.
    loss_mask: which tokens count, as many elements as token losses. None: the mask that comes with the losses, where
        the model returns ``(losses, loss_mask)``, else all.
    packed_seq_params: anything with the boundaries of packed documents: ``PackedSeqParams``, or a mapping such as the
        batch. Read are ``cu_seqlens_q_padded``, else ``cu_seqlens_q``, else ``cu_seqlens`` (up to
        ``cu_seqlens_argmin``, if that is there, on the host), of shape ``[N]`` or ``[1, N]``. None: every row of the
        ``[B, S]`` losses is a segment.
    cp: which part of the global row this rank holds. Default: :func:`context_parallel` of ``packed_seq_params``.
    ignore_index: the value in ``loss_mask`` of tokens that do not count.
    fractional_mask: None: the mask only selects. ``"tokens"``: it also weighs, and a channel's mean is the weighted sum
        over the number of tokens with a weight that is not 0. ``"weights"``: the same over the sum of weights; the
        tracker then needs ``num_values=2``.
    mode: of the tracker. Default: ``"train"`` where gradients are enabled, else ``"eval"``.
    report: ``"keys"`` also adds an entry ``prefix + channel`` for every channel of the fixed vocabulary, in one order
        on all ranks and micro-batches, to the report, in the form that is there: ``[sum, count]`` tensors, which
        Megatron reduces, or tuples, which it does not, so that the last rank shows its own. Mind that Megatron averages
        these entries over the steps of a log interval, each step weighing the same, and shows NaN for a channel that
        had no token in one of them; the tracker does neither.

    A second run of an iteration by Megatron's re-run state machine is not counted again.

    Raises ValueError for arguments that do not fit, here or at the first call.
    """
    if fractional_mask not in _FRACTIONAL:
        raise ValueError(f"fractional_mask must be None, 'tokens' or 'weights', but is {fractional_mask!r}")
    if report not in _REPORTS:
        raise ValueError(f"report must be None or 'keys', but is {report!r}")
    if report == "keys" and tracker.registry.grow:
        raise ValueError("report='keys' needs a fixed ChannelRegistry: all ranks must report the same keys")
    values = 2 if fractional_mask == "weights" else 1
    if tracker.num_values != values:
        raise ValueError(
            f"fractional_mask={fractional_mask!r} needs num_values={values}, but it is {tracker.num_values}"
        )

    @functools.wraps(loss_func)
    def tracked(output_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = loss_func(output_tensor, *args, **kwargs)
        if not _is_loss(outputs, kwargs):
            return outputs
        batch = _MicroBatch(output_tensor, loss_mask, packed_seq_params, cp, ignore_index, fractional_mask)
        ids = batch.ids(tracker, channels)
        if not _is_rerun():
            tracker.update(
                batch.values, batch.mask, ids, cu_seqlens=batch.cu_seqlens, cp=batch.cp, mode=mode,
                ignore_index=ignore_index,
            )  # fmt: skip
        if report is None:
            return outputs
        entries = batch.report(tracker, ids, prefix, as_tuples=_holds_tuples(outputs[-1]))
        return (*outputs[:-1], {**outputs[-1], **entries})

    return tracked


def context_parallel(packed_seq_params: Any = None) -> ContextParallel:
    """How Megatron has cut the row of this micro-batch, from its parallel state and ``packed_seq_params``.

    Group: the micro-batch's own, with hybrid context parallelism (``local_cp_size``), else Megatron's. Layout:
    ``contiguous`` where ``cp_partition_mode`` says so; ``per_document`` for packed documents; ``per_sequence`` where
    ``qkv_format`` is one for rows. Make a :class:`~segscatter.ContextParallel` yourself where this does not hold.
    """
    get = _getter(packed_seq_params)
    local_size = get("local_cp_size")
    if local_size is not None:
        size = int(local_size)
        rank = dist.get_rank(get("cp_group")) if size > 1 else 0
    else:
        size, rank = _context_parallel_place()
    if size == 1:
        return ContextParallel()
    if get("cp_partition_mode") == "contiguous":
        return ContextParallel("contiguous", size, rank)
    packed = get("qkv_format") in (None, "thd")
    return ContextParallel("per_document" if packed else "per_sequence", size, rank)


def data_parallel_group() -> dist.ProcessGroup:
    """Megatron's data x context parallel group. Give the function itself to ``ChannelLossTracker(group=...)``."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def tensor_and_data_parallel_group() -> dist.ProcessGroup:
    """Megatron's tensor x data x context parallel group; see the module's text for when to use it."""
    from megatron.core import parallel_state

    return parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)


def channel_means(stats: Mapping[str, ChannelStat], prefix: str = "loss_") -> dict[str, float]:
    """``{prefix + channel: mean}`` of what ``tracker.reduce()`` returned.

    With ``num_values=2`` (``fractional_mask="weights"``) the mean is the first sum over the second.
    """
    means = {}
    for name, stat in stats.items():
        if isinstance(stat.sum, tuple):
            loss, weight = stat.sum
            means[prefix + name] = loss / weight if weight else float("nan")
        else:
            means[prefix + name] = stat.mean
    return means


def log_channel_losses(
    tracker: ChannelLossTracker,
    iteration: int,
    log_interval: int = 1,
    *,
    logs: dict[str, Any] | None = None,
    tensorboard: Any = None,
    wandb: Any = None,
    mode: str = "train",
    prefix: str = "loss_",
) -> dict[str, float]:
    """Where ``iteration`` is a multiple of ``log_interval``: reduces, writes, and returns ``{prefix + channel: mean}``.

    Call it on every rank of the tracker's group, in every iteration: it holds a collective. Other iterations return
    ``{}``.

    logs: a dict to add the means to. tensorboard: has ``add_scalar(name, value, step)``. wandb: has
    ``log(dict, step=...)``. Each may be None, as writers are on most ranks.
    """
    if log_interval < 1:
        raise ValueError(f"log_interval must be at least 1, but is {log_interval}")
    if iteration % log_interval:
        return {}
    means = channel_means(tracker.reduce(mode), prefix)
    if logs is not None:
        logs.update(means)
    if tensorboard is not None:
        for name, mean in means.items():
            tensorboard.add_scalar(name, mean, iteration)
    if wandb is not None and means:
        wandb.log(means, step=iteration)
    return means


def wrap_train_step(train_step: Callable[..., Any], tracker: ChannelLossTracker) -> Callable[..., Any]:
    """``train_step`` of ``megatron.training.training``; iterations that it skips (its second result is true: overflow,
    NaN) and those that raise do not count in ``tracker``.

    Raises TypeError at the first call when ``train_step`` does not return a tuple of at least two elements.
    """

    @functools.wraps(train_step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        tracker.begin_step()
        committed = False
        try:
            result = train_step(*args, **kwargs)
            if not isinstance(result, tuple) or len(result) < 2:
                raise TypeError(f"train_step must return (loss_dict, skipped_iter, ...), but returned {type(result)}")
            committed = not result[1]
        finally:
            tracker.commit_step() if committed else tracker.discard_step()
        return result

    return tracked


def wrap_training_log(
    training_log: Callable[..., Any],
    tracker: ChannelLossTracker,
    log_interval: int | Callable[[], int],
    *,
    tensorboard: Callable[[], Any] | None = None,
    wandb: Callable[[], Any] | None = None,
    print_line: Callable[[str], Any] | None = None,
    prefix: str = "loss_",
) -> Callable[..., Any]:
    """``training_log`` of ``megatron.training.training``, which every rank calls after every iteration; every
    ``log_interval`` of them it then also logs the channel losses.

    log_interval: or a function giving it, since Megatron parses its arguments late. tensorboard, wandb: functions
    giving the writers (``get_tensorboard_writer``, ``get_wandb_writer``). print_line: such as ``print_rank_last``.

    Raises TypeError when ``training_log`` has no parameter ``iteration``.
    """
    signature = inspect.signature(training_log)
    if "iteration" not in signature.parameters:
        raise TypeError(f"training_log must have a parameter 'iteration', but its signature is {signature}")

    @functools.wraps(training_log)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        result = training_log(*args, **kwargs)
        iteration = signature.bind(*args, **kwargs).arguments["iteration"]
        means = log_channel_losses(
            tracker,
            iteration,
            log_interval() if callable(log_interval) else log_interval,
            tensorboard=tensorboard and tensorboard(),
            wandb=wandb and wandb(),
            prefix=prefix,
        )
        if means and print_line is not None:
            print_line(f" iteration {iteration} | " + " | ".join(f"{name}: {mean:.6E}" for name, mean in means.items()))
        return result

    return tracked


class BatchTap(Iterator):
    """An iterator that remembers in ``batch`` what it gave last: ``get_batch`` drops keys that it does not know."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.batch: Any = None

    def __next__(self) -> Any:
        self.batch = next(self._iterator)
        return self.batch


class _MicroBatch:
    """The token losses of one micro-batch, where they belong, and what counts."""

    def __init__(
        self,
        output_tensor: Any,
        loss_mask: Tensor | None,
        packed_seq_params: Any,
        cp: ContextParallel | None,
        ignore_index: int,
        fractional_mask: str | None,
    ) -> None:
        losses = output_tensor
        if isinstance(output_tensor, tuple):  # vision-language models return a mask made for the tokens they inserted
            losses, mask_of_model = output_tensor[:2]
            loss_mask = mask_of_model if loss_mask is None else loss_mask
        self._ignore_index = ignore_index
        self.mask = loss_mask
        self.cu_seqlens = None if packed_seq_params is None else _boundaries(packed_seq_params)
        self.cp = None
        if self.cu_seqlens is not None:
            self.cp = cp if cp is not None else context_parallel(packed_seq_params)
        self._rows = losses.shape[0] if losses.dim() == 2 else 1
        self.values = _weighed(losses.detach(), loss_mask, fractional_mask)

    def ids(self, tracker: ChannelLossTracker, channels: Tensor | Iterable[object] | None) -> Tensor:
        """Group ids, at most one a segment."""
        if isinstance(channels, Tensor):
            return channels
        segments = self._rows if self.cu_seqlens is None else self.cu_seqlens.numel() - 1
        return tracker.registry.encode([None] * segments if channels is None else channels)

    def report(self, tracker: ChannelLossTracker, ids: Tensor, prefix: str, *, as_tuples: bool) -> dict[str, Any]:
        """``[sum, count]`` of every channel in this micro-batch; new storage, so the schedule may divide the loss."""
        cu_seqlens, device = self.cu_seqlens, self.values.device
        if cu_seqlens is None:
            per_row = self.values.shape[-1] if self.values.dim() else 0
            cu_seqlens = torch.arange(self._rows + 1, device=device) * per_row
        segments = cu_seqlens.numel() - 1
        if ids.numel() < segments:
            ids = torch.nn.functional.pad(ids, (0, segments - ids.numel()), value=-1)
        lead = self.values.shape[:1] if tracker.num_values > 1 else ()
        sums, counts = segment_scatter_reduce(
            self.values.reshape(*lead, -1),
            cu_seqlens.to(device, non_blocking=True),
            ids.to(device, non_blocking=True),
            tracker.registry.num_groups,
            mask=None if self.mask is None else self.mask.reshape(-1).to(device, non_blocking=True),
            ignore_index=self._ignore_index,
            cp=self.cp,
            dtype=torch.float32,
        )
        table = sums.t() if lead else torch.stack([sums, counts.to(sums.dtype)], dim=-1)
        rows = [tuple(row.unbind()) for row in table] if as_tuples else table.unbind()
        return {prefix + name: row for name, row in zip(tracker.registry.names, rows, strict=True)}


def _weighed(losses: Tensor, mask: Tensor | None, fractional_mask: str | None) -> Tensor:
    """``losses``, times ``mask`` where it weighs; ``[2, ...]`` with the weights below where those are to be summed."""
    if fractional_mask is None:
        return losses
    if mask is None:
        raise ValueError(f"fractional_mask={fractional_mask!r} needs a loss_mask")
    dtype = torch.promote_types(losses.dtype, torch.float32)
    weights = mask.detach().reshape(losses.shape).to(losses.device, dtype, non_blocking=True)
    weighed = losses.to(dtype) * weights
    return weighed if fractional_mask == "tokens" else torch.stack([weighed, weights])


def _is_loss(outputs: Any, kwargs: Mapping[str, Any]) -> bool:
    """False for what Megatron collects from evaluation passes in place of a loss."""
    if kwargs.get("non_loss_data"):
        return False
    if not isinstance(outputs, tuple) or len(outputs) not in (2, 3):
        raise ValueError(
            f"loss_func must return (loss, num_tokens, report) or (loss, report), but returned "
            f"{f'{len(outputs)} elements' if isinstance(outputs, tuple) else type(outputs).__name__}"
        )
    return True


def _holds_tuples(report: Mapping[str, Any]) -> bool:
    return any(isinstance(value, tuple | list) for value in report.values())


def _getter(source: Any) -> Callable[[str], Any]:
    if isinstance(source, Mapping):
        return source.get
    return lambda name: getattr(source, name, None)


def _boundaries(source: Any) -> Tensor:
    get = _getter(source)
    for name in ("cu_seqlens_q_padded", "cu_seqlens_q", "cu_seqlens"):
        cu_seqlens = get(name)
        if cu_seqlens is not None:
            break
    else:
        raise ValueError(
            f"packed_seq_params must have cu_seqlens_q_padded, cu_seqlens_q or cu_seqlens, but this "
            f"{type(source).__name__} has none of them"
        )
    if cu_seqlens.dim() > 1 and cu_seqlens.shape[0] != 1:
        raise ValueError(f"{name} must have shape [N] or [1, N], but has {list(cu_seqlens.shape)}")
    cu_seqlens = cu_seqlens.reshape(-1)
    used = get("cu_seqlens_argmin") if name == "cu_seqlens" else None
    return cu_seqlens if used is None else cu_seqlens[: int(used)]


def _context_parallel_place() -> tuple[int, int]:
    """Size and rank of Megatron's context-parallel group; (1, 0) where Megatron is not in use."""
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return 1, 0
    return parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()


def _is_rerun() -> bool:
    """Whether this process repeats an iteration, on the same data, to find out if a bad result comes again."""
    module = sys.modules.get("megatron.core.rerun_state_machine")
    machine = getattr(module, "_GLOBAL_RERUN_STATE_MACHINE", None)  # the public getter would create one
    return machine is not None and machine.state.name == "RERUNNING_IN_PLACE"
