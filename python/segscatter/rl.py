# SPDX-License-Identifier: Apache-2.0
"""Losses of RL trainers: sums and means over the sampled responses of a micro-batch.

:class:`SampleReducer` and :func:`get_sum_of_sample_mean` do in one pass over packed responses what slime's reducer does
in a Python loop over samples; :func:`agg_loss` has the aggregation modes of verl, for padded and packed batches.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .means import check_denominators, divide
from .ops import segment_scatter_reduce

__all__ = [
    "AGGREGATION_MODES",
    "SampleReducer",
    "agg_loss",
    "get_sum_of_sample_mean",
    "install_slime",
    "install_verl",
]


class SampleReducer:
    """Sums over samples of the mean over each sample's live tokens: built once per micro-batch, called per metric.

    The values it takes are the responses of S samples, one behind the other in one row; with context parallel, this
    rank's part of each response.

    response_lengths: S lengths, on the host.
    loss_masks: which tokens of the whole responses are live: S masks (tensors or sequences of 0 and 1), or one tensor
        of ``sum(response_lengths)`` elements; None: all. Masks select and do not weigh: to weigh tokens, multiply the
        values and give ``denominators``. On the host, or on the device already: then nothing is read back from it.
    denominators: S numbers to divide the sums by (clamped to at least 1): a sequence, a tensor, or a sequence of
        one-element tensors. Default: each sample's live tokens in its whole response. Give the live tokens of a rollout
        group to all its samples for means over groups.
    per_token: True for the plain sum over live tokens; ``denominators`` are then not used.
    total_lengths: S lengths of prompt and response together, on the host; for context parallel.
    padded_lengths: S lengths that sequences have when they are cut, if they are padded beyond ``total_lengths``.
    cp_size, cp_rank, cp_partition: how sequences are cut for context parallel: into ``2 * cp_size`` chunks of equal
        length (rounded up), of which a rank holds numbers ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` (``"zigzag"``)
        or ``2 * cp_rank`` and the next (``"contiguous"``). The value of a token lies where its predecessor, which
        predicts it, lies. What the ranks return adds up to what one rank would return.
    device: of the values to come. Default: that of ``loss_masks`` or ``denominators``, if tensors, else the CPU.

    What is on the host goes to the device in one copy, without blocking. Raises ValueError or TypeError, naming the
    argument.
    """

    def __init__(
        self,
        response_lengths: Sequence[int] | Tensor,
        loss_masks: Sequence[Tensor | Sequence[int]] | Tensor | None = None,
        *,
        denominators: Sequence[float | Tensor] | Tensor | None = None,
        per_token: bool = False,
        total_lengths: Sequence[int] | Tensor | None = None,
        padded_lengths: Sequence[int] | Tensor | None = None,
        cp_size: int = 1,
        cp_rank: int = 0,
        cp_partition: str = "zigzag",
        device: torch.device | str | None = None,
    ) -> None:
        lengths = _host_lengths("response_lengths", response_lengths)
        tables = {"offsets": _offsets(lengths)}
        if loss_masks is not None:
            tables["mask"] = _one_row_of_masks(loss_masks, lengths)
        if denominators is not None and not per_token:
            tables["denominators"] = _one_row_of_denominators(denominators, lengths.numel())
        if cp_size != 1 or cp_rank != 0:
            total = _host_lengths("total_lengths", total_lengths, like=lengths)
            padded = total if padded_lengths is None else _host_lengths("padded_lengths", padded_lengths, like=lengths)
            begins, ends = _local_pieces(lengths, total, padded, cp_size, cp_rank, cp_partition)
            tables["piece_begins"] = (begins + tables["offsets"][:-1, None]).flatten()
            tables["piece_lengths"] = (ends - begins).flatten()
            lengths = (ends - begins).sum(-1)
        tables["cu_seqlens"] = _offsets(lengths)

        self.num_samples = lengths.numel()
        self.num_tokens = int(tables["cu_seqlens"][-1])
        self.per_token = per_token
        if per_token:  # one segment: it does not matter whose the tokens are
            tables["cu_seqlens"] = lengths.new_tensor([0, self.num_tokens])

        device = _target_device(device, tables)
        if "mask" in tables and tables["mask"].device.type != "cpu":
            tables = self._finish(_to_device(tables, device))
        else:
            tables = _to_device(self._finish(tables), device)
        self._cu_seqlens, self._mask = tables["cu_seqlens"], tables.get("mask")
        self._divisors = tables.get("divisors")

    def _finish(self, tables: dict[str, Tensor]) -> dict[str, Tensor]:
        """What calls need, from what the constructor was given; on the host or on the device."""
        finished = {"cu_seqlens": tables["cu_seqlens"]}
        mask = tables.get("mask")
        if not self.per_token:
            denominators = tables.get("denominators")
            if denominators is None:
                denominators = tables["offsets"].diff() if mask is None else _live_tokens(mask, tables["offsets"])
            finished["divisors"] = denominators.clamp(min=1)
        if mask is not None and "piece_begins" in tables:
            mask = _select_pieces(mask, tables["piece_begins"], tables["piece_lengths"], self.num_tokens)
        if mask is not None:
            finished["mask"] = mask
        return finished

    def __call__(self, values: Tensor) -> Tensor:
        """values: ``[T]``, or ``[K, T]`` for K metrics in one pass. Returns a scalar or ``[K]``; differentiable."""
        if values.shape[-1:] != (self.num_tokens,):
            raise ValueError(
                f"values must have shape [T] or [K, T] with T = {self.num_tokens}, the tokens of {self.num_samples} "
                f"samples on this rank, but have shape {list(values.shape)}"
            )
        if not values.is_floating_point():
            values = values.float()  # a flag or a number of each token
        num_segments = self._cu_seqlens.numel() - 1
        sums, _ = segment_scatter_reduce(values, self._cu_seqlens, None, num_segments, mask=self._mask)
        return sums.squeeze(-1) if self.per_token else divide(sums, self._divisors).sum(-1)


_SLIME_MODULE = "slime.backends.megatron_utils.cp_utils"
_SLIME_OPTIONS = ("sample_denoms", "calculate_per_token_loss", "qkv_format", "max_seq_lens")


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    *options: Any,
    cp_size: int | None = None,
    cp_rank: int | None = None,
    cp_partition: str | None = None,
    **named_options: Any,
) -> SampleReducer:
    """Stands in for ``slime.backends.megatron_utils.cp_utils.get_sum_of_sample_mean``, with its arguments.

    total_lengths, response_lengths, loss_masks: S each, of whole samples, also with context parallel.
    options: ``sample_denoms=None, calculate_per_token_loss=False, qkv_format="thd", max_seq_lens=None``, by position or
        name; by position also without ``sample_denoms``, as older versions of slime have it.
    cp_size, cp_rank, cp_partition: see :class:`SampleReducer`. Default: what Megatron and slime are set to in this
        process; one rank where Megatron is not installed.

    Returns a function of ``[T]`` or ``[K, T]``: the sum over samples of masked means, or with
    ``calculate_per_token_loss`` the sum over tokens. Results are float32 for bfloat16 and float16 values.
    """
    positional = _SLIME_OPTIONS[1:] if options and isinstance(options[0], bool) else _SLIME_OPTIONS
    if len(options) > len(positional):
        raise TypeError(f"at most {3 + len(positional)} arguments can be given by position, but there are more")
    given = dict(zip(positional, options, strict=False))
    for name, value in named_options.items():
        if name not in _SLIME_OPTIONS or name in given:
            raise TypeError(f"argument {name!r} is {'given twice' if name in given else 'not known'}")
        given[name] = value
    qkv_format, max_seq_lens = given.get("qkv_format", "thd"), given.get("max_seq_lens")
    if qkv_format not in ("thd", "bshd"):
        raise ValueError(f"qkv_format must be 'thd' or 'bshd', but is {qkv_format!r}")
    if (cp_size is None) != (cp_rank is None):
        raise ValueError("cp_size and cp_rank must be given together")
    if cp_size is None:
        cp_size, cp_rank = _megatron_context_parallel()
    if qkv_format == "bshd" and cp_size > 1 and max_seq_lens is None:
        raise ValueError("max_seq_lens must be given for qkv_format 'bshd': it is the padded length that is cut")
    return SampleReducer(
        response_lengths,
        loss_masks,
        denominators=given.get("sample_denoms"),
        per_token=given.get("calculate_per_token_loss", False),
        total_lengths=total_lengths,
        padded_lengths=max_seq_lens if qkv_format == "bshd" else None,
        cp_size=cp_size,
        cp_rank=cp_rank,
        cp_partition=_slime_partition() if cp_partition is None else cp_partition,
    )


AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor | None,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: float | Tensor | None = None,
    global_batch_size: float | Tensor | None = None,
    loss_scale_factor: float | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """One loss from the losses of all tokens: verl's ``agg_loss``, for padded and packed batches.

    loss_mat: ``[B, T]`` or ``[K, B, T]``, a sequence per row; with ``cu_seqlens``: ``[T]`` or ``[K, T]``, packed.
    loss_mask: one element per token, 0 where it is dead; None: all are live. It selects: a dead NaN does no harm.
    loss_agg_mode: with n live tokens and B sequences that have a live token, where global numbers take the place of n
        and B if they are given:
        ``"token-mean"``: the sum over tokens / n;
        ``"seq-mean-token-sum"``: the sum over tokens / B;
        ``"seq-mean-token-mean"``: the sum of the sequences' means / B;
        ``"seq-mean-token-sum-norm"``: the sum over tokens / B / ``loss_scale_factor``.
    dp_size: data-parallel ranks whose gradients will be averaged; multiplies the result, and above 1 needs the global
        number that the mode divides by.
    batch_num_tokens, global_batch_size: live tokens and sequences of the whole batch, of all ranks and micro-batches;
        numbers, or one-element tensors (not read by the host).
    loss_scale_factor: a constant; for padded input it defaults to T, the padded length.
    cu_seqlens: ``[S + 1]`` offsets of packed sequences.

    Returns a scalar or ``[K]``, float64 for float64 losses, else float32; 0 where nothing is live. Raises ValueError or
    TypeError, naming the argument.
    """
    if loss_agg_mode not in AGGREGATION_MODES:
        raise ValueError(f"loss_agg_mode must be one of {', '.join(AGGREGATION_MODES)}, but is {loss_agg_mode!r}")
    by_token = loss_agg_mode == "token-mean"
    name, total_count = ("batch_num_tokens", batch_num_tokens) if by_token else ("global_batch_size", global_batch_size)
    if dp_size < 1:
        raise ValueError(f"dp_size must be at least 1, but is {dp_size}")
    if dp_size > 1 and total_count is None:
        raise ValueError(f"{name} must be given for loss_agg_mode {loss_agg_mode!r} with dp_size {dp_size}")
    if loss_agg_mode != "seq-mean-token-sum-norm":
        loss_scale_factor = 1
    elif loss_scale_factor is None:
        if cu_seqlens is not None:
            raise ValueError(f"loss_scale_factor must be given for loss_agg_mode {loss_agg_mode!r} of packed sequences")
        loss_scale_factor = max(loss_mat.shape[-1], 1)
    elif loss_scale_factor <= 0:
        raise ValueError(f"loss_scale_factor must be positive, but is {loss_scale_factor}")

    if cu_seqlens is None:
        loss_mat, loss_mask, cu_seqlens = _pack_rows(loss_mat, loss_mask)
    sums, counts = segment_scatter_reduce(loss_mat, cu_seqlens, None, cu_seqlens.numel() - 1, mask=loss_mask)
    if loss_agg_mode == "seq-mean-token-mean":
        sums = sums / counts.clamp(min=1)
    if total_count is None:
        total_count = counts.sum() if by_token else (counts > 0).sum()
    return _scale(sums.sum(-1), total_count, dp_size / loss_scale_factor)


def install_slime(args: Any = None) -> None:
    """Makes slime use :func:`get_sum_of_sample_mean`: ``--custom-megatron-init-path segscatter.rl.install_slime``.

    args: slime's arguments, which its hook passes; not used.
    """
    _replace("slime", _SLIME_MODULE, get_sum_of_sample_mean)


def install_verl() -> None:
    """Makes verl use :func:`agg_loss` in this process."""
    _replace("verl", "verl.trainer.ppo.core_algos", agg_loss)


def _replace(package: str, module: str, function: Callable) -> None:
    """Puts ``function`` in place of its namesake in ``module``, and where the package has imported it from there."""
    name = function.__name__
    original = getattr(importlib.import_module(module), name)
    for other, loaded in list(sys.modules.items()):
        if other.split(".")[0] == package and getattr(loaded, "__dict__", {}).get(name) is original:
            setattr(loaded, name, function)


def _pack_rows(loss_mat: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """``[..., B, T]`` as ``[..., B * T]``, the mask likewise, and the offsets of the rows."""
    if loss_mat.dim() not in (2, 3):
        raise ValueError(f"loss_mat must have shape [B, T] or [K, B, T], but has shape {list(loss_mat.shape)}")
    rows, length = loss_mat.shape[-2:]
    if loss_mask is not None:
        if loss_mask.shape != (rows, length):
            raise ValueError(f"loss_mask must have shape {[rows, length]}, but has shape {list(loss_mask.shape)}")
        loss_mask = loss_mask.flatten()
    return loss_mat.flatten(-2), loss_mask, torch.arange(rows + 1, device=loss_mat.device) * length


def _scale(total: Tensor, count: float | Tensor, factor: float) -> Tensor:
    """``total / max(count, 1) * factor``, in the dtype of ``total``."""
    if isinstance(count, Tensor):
        total = divide(total, count.reshape(()).clamp(min=1))
    else:
        factor /= max(count, 1)
    return total if factor == 1 else total * factor


def _megatron_context_parallel() -> tuple[int, int]:
    """Size and rank of Megatron's context-parallel group."""
    try:
        from megatron.core import mpu
    except ModuleNotFoundError:
        return 1, 0
    size = mpu.get_context_parallel_world_size()
    return size, mpu.get_context_parallel_rank() if size > 1 else 0


def _slime_partition() -> str:
    """The partition that slime's own module is set to; versions that know one only have no setting."""
    module = sys.modules.get(_SLIME_MODULE)
    return module.get_cp_partition_mode() if hasattr(module, "get_cp_partition_mode") else "zigzag"


def _offsets(lengths: Tensor) -> Tensor:
    """``[S + 1]`` from ``[S]``."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _host_lengths(name: str, lengths: Sequence[int] | Tensor | None, like: Tensor | None = None) -> Tensor:
    """``[S]`` int64 on the host; as many as in ``like``."""
    if lengths is None:
        raise ValueError(f"{name} must be given with context parallel")
    if isinstance(lengths, Tensor) and lengths.device.type != "cpu":
        raise ValueError(f"{name} must be on the host, but are on {lengths.device}")
    row = torch.as_tensor(lengths, device="cpu")
    if row.numel() > 0 and (row.is_floating_point() or row.dtype == torch.bool):
        raise TypeError(f"{name} must be integers, but are {row.dtype}")
    if row.dim() != 1 or (like is not None and row.shape != like.shape):
        wanted = "[S]" if like is None else f"[S] = {list(like.shape)}"
        raise ValueError(f"{name} must have shape {wanted}, one for each sample, but have shape {list(row.shape)}")
    row = row.to(torch.int64)
    if row.numel() > 0 and int(row.min()) < 0:
        first = int((row < 0).nonzero()[0])
        raise ValueError(f"{name} must not be negative, but number {first} is {int(row[first])}")
    return row


def _one_row_of_masks(masks: Sequence[Tensor | Sequence[int]] | Tensor, lengths: Tensor) -> Tensor:
    """The masks of all samples, one behind the other; as bool, unless it is on a device."""
    row = masks.reshape(-1) if isinstance(masks, Tensor) else _concatenate(masks, lengths.tolist())
    if row.numel() != int(lengths.sum()):
        raise ValueError(
            f"loss_masks must have one element for each of the {int(lengths.sum())} tokens of response_lengths, "
            f"but have {row.numel()}"
        )
    if row.is_complex():
        raise TypeError(f"loss_masks must be bool, integer or floating, but are {row.dtype}")
    on_host = row.device.type == "cpu"
    if row.dtype == torch.bool or not (on_host or os.environ.get("SEGSCATTER_VALIDATE") == "1"):
        return row
    live = row.to(torch.bool)
    if not _is_binary(row, live):
        raise ValueError(
            "loss_masks select tokens, so they must be 0 or 1 everywhere, but are not; to weigh tokens, multiply the "
            "values and give denominators"
        )
    return live


def _is_binary(row: Tensor, live: Tensor) -> bool:
    """Whether ``row`` holds 0 and 1 only; ``live``: the same as bool."""
    if row.is_floating_point():
        return torch.equal(live.to(row.dtype), row)
    low, high = torch.aminmax(row) if row.numel() > 0 else (0, 0)
    return bool(low >= 0) and bool(high <= 1)


def _concatenate(masks: Sequence[Tensor | Sequence[int]], lengths: list[int]) -> Tensor:
    """The masks as one row, if there is one of the right length for each sample."""
    if set(map(type, masks)) != {Tensor}:
        masks = [mask if isinstance(mask, Tensor) else torch.as_tensor(mask, device="cpu") for mask in masks]
    if len(masks) != len(lengths):
        raise ValueError(f"there are {len(masks)} loss_masks for {len(lengths)} response_lengths")
    if [mask.shape for mask in masks] != [(length,) for length in lengths]:
        masks = [mask.flatten() for mask in masks]
        for i, (mask, length) in enumerate(zip(masks, lengths, strict=True)):
            if mask.numel() != length:
                raise ValueError(f"loss_masks[{i}] has {mask.numel()} elements, but response_lengths[{i}] is {length}")
    return torch.cat(list(masks)) if masks else torch.empty(0, dtype=torch.bool, device="cpu")


def _one_row_of_denominators(denominators: Sequence[float | Tensor] | Tensor, num_samples: int) -> Tensor:
    """``[S]``; on the host as int64 or float64."""
    if not isinstance(denominators, Tensor) and any(isinstance(d, Tensor) for d in denominators):
        denominators = torch.stack([torch.as_tensor(d).reshape(()) for d in denominators])
    row = denominators if isinstance(denominators, Tensor) else torch.as_tensor(denominators, device="cpu")
    if row.numel() == 0:
        row = row.to(torch.int64)
    row = check_denominators(row, num_samples, row.device)
    return row.to(torch.float64 if row.is_floating_point() else torch.int64) if row.device.type == "cpu" else row


def _local_pieces(
    lengths: Tensor, total: Tensor, padded: Tensor, size: int, rank: int, partition: str
) -> tuple[Tensor, Tensor]:
    """Begin and end, ``[S, 2]`` each, of the two pieces of each response that this rank holds.

    Counted from the response's first token. Values lie one place before their tokens, at the logits that predict them.
    """
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"cp_rank must lie in [0, cp_size), but cp_rank is {rank} and cp_size is {size}")
    if partition not in ("zigzag", "contiguous"):
        raise ValueError(f"cp_partition must be 'zigzag' or 'contiguous', but is {partition!r}")
    for name, short, long_name, long in (
        ("response_lengths", lengths, "total_lengths", total),
        ("total_lengths", total, "padded_lengths", padded),
    ):
        if bool((short > long).any()):
            first = int((short > long).nonzero()[0])
            raise ValueError(
                f"{long_name} must not be less than {name}, but number {first} is {int(long[first])} and "
                f"{int(short[first])}"
            )
    numbers = (rank, 2 * size - 1 - rank) if partition == "zigzag" else (2 * rank, 2 * rank + 1)
    chunk = (padded + 2 * size - 1) // (2 * size)
    first_logit = (total - lengths - 1)[:, None]
    begins = chunk[:, None] * chunk.new_tensor(numbers) - first_logit
    ends = begins + chunk[:, None]
    limit = lengths[:, None]
    return begins.clamp(min=0).minimum(limit), ends.clamp(min=0).minimum(limit)


def _select_pieces(row: Tensor, begins: Tensor, lengths: Tensor, num_tokens: int) -> Tensor:
    """The pieces ``[begin, begin + length)`` of ``row``, one behind the other; ``num_tokens`` elements in all."""
    shifts = begins - (lengths.cumsum(0) - lengths)
    positions = torch.arange(num_tokens, device=row.device)
    return row[positions + shifts.repeat_interleave(lengths, output_size=num_tokens)]


def _live_tokens(mask: Tensor, offsets: Tensor) -> Tensor:
    """``[S]`` int64: the live tokens of each segment."""
    nothing = torch.zeros(1, device=mask.device).expand(mask.numel())
    return segment_scatter_reduce(nothing, offsets, None, offsets.numel() - 1, mask=mask)[1]


def _target_device(device: torch.device | str | None, tables: dict[str, Tensor]) -> torch.device:
    """``device``, or where the mask or the denominators are."""
    if device is not None:
        return torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
    devices = [tables[name].device for name in ("mask", "denominators") if name in tables]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def _to_device(tables: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tables on ``device``; those on the host go there in one copy that does not block."""
    for name, table in tables.items():
        if table.device.type != "cpu" and table.device != device:
            raise ValueError(f"{name} is on {table.device}, but the values will be on {device}")
    here = {name: table for name, table in tables.items() if table.device.type == "cpu"}
    here = dict(sorted(here.items(), key=lambda item: -item[1].element_size()))  # keeps every table aligned
    sizes = [table.numel() * table.element_size() for table in here.values()]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    torch.cat([table.view(torch.uint8) for table in here.values()], out=buffer)
    parts = buffer.to(device, non_blocking=True).split(sizes)
    return tables | {name: part.view(here[name].dtype) for name, part in zip(here, parts, strict=True)}
