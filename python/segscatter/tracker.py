# SPDX-License-Identifier: Apache-2.0
"""Mean losses of channels, gathered without a host sync or a collective until they are asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import ops
from .channels import ChannelRegistry
from .distributed import Group, SharedVocabulary, communication_device, resolve_group
from .ops import ContextParallel

__all__ = ["ChannelLossTracker", "ChannelStat"]

_STATE_VERSION = 1


@dataclass(frozen=True)
class ChannelStat:
    """What a channel has gathered: the sum of its live tokens' losses, their number (at least 1), and their mean.

    With ``num_values=K`` above 1, ``sum`` and ``mean`` are tuples of K floats.
    """

    sum: float | tuple[float, ...]
    count: int
    mean: float | tuple[float, ...]


class ChannelLossTracker:
    """Adds up the token losses of every channel, over micro-batches, steps and ranks.

    registry: the channels. Every rank needs the same fixed registry, or a growing one, whose names may differ.
    device: where losses come from and sums are kept. Default: the device of the first losses (until then the current
        CUDA device, or else the CPU).
    group: the ranks to sum over: a ProcessGroup, a callable giving one (called at every ``reduce``; for groups made
        later), or None: the default group where torch.distributed is initialised, else this process alone. Give the
        data-parallel (x context-parallel) group where other ranks hold copies of the same tokens (tensor parallel) or
        no loss at all (pipeline parallel).
    num_values: K; above 1, every token has K values (loss, accuracy, weight...) that share one pass and one count.

    Sums are float64 and counts int64, one set for each mode ("train", "eval", or any other string).
    """

    def __init__(
        self,
        registry: ChannelRegistry,
        device: torch.device | str | None = None,
        group: Group = None,
        *,
        num_values: int = 1,
    ) -> None:
        if not isinstance(registry, ChannelRegistry):
            raise TypeError(f"registry must be a ChannelRegistry, but is a {type(registry).__name__}")
        if not isinstance(num_values, int) or num_values < 1:
            raise ValueError(f"num_values must be at least 1, an integer, but is {num_values!r}")
        self._registry = registry
        self._device = None if device is None else torch.device(device)
        self._group = group
        self._num_values = num_values
        self._vocabulary = SharedVocabulary(registry, num_values)
        self._totals: dict[str, _Accumulator] = {}
        self._step: dict[str, _Accumulator] = {}
        self._in_step = False
        self._row_offsets: tuple[tuple[int, int], Tensor] | None = None
        self._unseen_reported = registry.unseen
        self._unseen_warned = False

    @property
    def registry(self) -> ChannelRegistry:
        return self._registry

    @property
    def num_values(self) -> int:
        return self._num_values

    @property
    def device(self) -> torch.device:
        """Where the sums are kept."""
        if self._device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return self._device

    def update(
        self,
        losses: Tensor | Sequence[Tensor],
        mask: Tensor | None,
        ids: Tensor | Iterable[object],
        *,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        cp: ContextParallel | None = None,
        mode: str | None = None,
        ignore_index: int = 0,
    ) -> None:
        """Adds the losses of one micro-batch: one operator call, no collective, and device data stays unread.

        losses: ``[T]``, ``[1, T]`` or ``[B, S]``, float16, bfloat16, float32 or float64, on the tracker's device; they
            are detached. With ``num_values=K``: ``[K, ...]``, or K tensors of these shapes.
        mask: as many elements as there are tokens, bool, integer or float; token t counts iff
            ``mask[t] != ignore_index`` (labels: ``ignore_index=-100``). None: all tokens count.
        ids: the group id of every segment, int32 or int64 (from :meth:`ChannelRegistry.encode`), or the channel names
            themselves. Fewer than segments: the segments behind are padding and ignored.
        cu_seqlens: ``[N + 1]`` offsets of the N segments, int32 or int64; offsets in the global row when ``cp`` is
            given. None: every row of ``losses`` is a segment (of which a context-parallel rank holds some tokens:
            ``cp`` then makes no difference).
        cp: which part of the global row this rank holds. ``[B, S]`` losses with ``cu_seqlens`` are taken as one row of
            B * S tokens, which the ``per_sequence`` and ``contiguous`` layouts allow only for B = 1.
        mode: "train", "eval" or another set of sums. Default: "train" where gradients are enabled, else "eval".

        mask, ids and cu_seqlens may be on the host: they are copied without blocking.

        To capture this in a CUDA graph, use a fixed registry, have everything on the device and warm up in the same
        mode first; the sums then stay where they are.

        Raises ValueError for shapes or devices that do not fit and more ids than segments, TypeError for wrong types.
        """
        if mode is None:
            mode = "train" if torch.is_grad_enabled() else "eval"
        values, rows = self._values(losses)
        num_tokens = values.shape[-1]
        device = values.device
        if cu_seqlens is None:
            cu_seqlens, cp = self._offsets_of_rows(rows, num_tokens, device), None
        else:
            if cp is not None and cp.layout in ("per_sequence", "contiguous") and rows > 1:
                raise ValueError(f"cp layout {cp.layout!r} with cu_seqlens needs one row of losses, but has {rows}")
            cu_seqlens = _offsets(cu_seqlens)
        ids = self._ids(ids, cu_seqlens.numel() - 1)
        if mask is not None:
            if not isinstance(mask, Tensor):
                raise TypeError(f"mask must be a Tensor or None, but is a {type(mask).__name__}")
            if mask.numel() != num_tokens:
                raise ValueError(f"mask must have one element a token, but has {mask.numel()} for {num_tokens} tokens")
            mask = _to_device(_flat(mask), device, "mask")
        target = self._accumulator(self._step if self._in_step else self._totals, mode)
        ops.segment_scatter_accumulate_(
            target.sums,
            target.counts,
            values,
            _to_device(cu_seqlens, device, "cu_seqlens"),
            _to_device(ids, device, "ids"),
            mask=mask,
            ignore_index=ignore_index,
            cp=cp,
        )

    def begin_step(self) -> None:
        """Holds back what comes from here on until :meth:`commit_step`. An open step is discarded: a re-run begins."""
        self._in_step = True
        for accumulator in self._step.values():
            accumulator.zero_()

    def commit_step(self) -> None:
        """Adds what came since :meth:`begin_step` to the sums. Raises RuntimeError when no step is open."""
        if not self._in_step:
            raise RuntimeError("commit_step without begin_step")
        for mode, accumulator in self._step.items():
            self._accumulator(self._totals, mode).add_(accumulator)
        self.discard_step()

    def discard_step(self) -> None:
        """Forgets what came since :meth:`begin_step`: a skipped iteration. Raises RuntimeError when no step is open."""
        if not self._in_step:
            raise RuntimeError("discard_step without begin_step")
        self._in_step = False
        for accumulator in self._step.values():
            accumulator.zero_()

    def reduce(self, mode: str = "train") -> dict[str, ChannelStat]:
        """Sums, counts and means of the channels over all ranks since the last ``reduce`` of this mode.

        Collective: every rank of the group calls it with the same mode, whether it saw data or not. One all_reduce and
        one device-to-host copy; then the sums start anew. The first call in a group also checks that its ranks have one
        vocabulary. A growing registry compares them every time (one small all_reduce, read by the host), and exchanges
        the names when some are new.

        Returns the channels that have live tokens, in the order of their slots, which is the same on every rank. Counts
        are exact up to 2^53 (they travel as float64). What an open step holds is left out. With a fixed registry, the
        group's first rank warns once if names were encoded that the vocabulary lacks.

        Raises ValueError, the same on all ranks, when their vocabularies differ; the sums are then kept.
        """
        _check_mode(mode)
        device = self.device
        group = resolve_group(self._group)
        where = device if group is None else communication_device(group, device)
        self._vocabulary.agree(group, where)
        unseen = self._registry.unseen
        payload = self._payload(mode, max(unseen - self._unseen_reported, 0)).to(where)  # a copied registry starts anew
        if group is not None:
            dist.all_reduce(payload, group=group)
        *values, total_unseen = payload.tolist()
        self._unseen_reported = unseen
        if mode in self._totals:
            self._totals[mode].zero_()
        if total_unseen and not self._unseen_warned:
            self._unseen_warned = True
            if group is None or dist.get_rank(group) == 0:
                warnings.warn(
                    f"{int(total_unseen)} channel names outside the vocabulary were encoded; their segments count in "
                    f"{self._registry.other!r}",
                    stacklevel=2,
                )
        return self._stats(values)

    def reset(self, mode: str | None = None) -> None:
        """Forgets the sums of a mode, or of all modes and an open step."""
        if mode is not None:
            _check_mode(mode)
        elif self._in_step:
            self.discard_step()
        for name, accumulator in self._totals.items():
            if mode in (None, name):
                accumulator.zero_()  # in place: CUDA graphs may hold its address

    def state_dict(self) -> dict[str, Any]:
        """This rank's sums and counts (copies, on the tracker's device) with the vocabulary they belong to.

        Every rank's state is its own: load what a rank saved on one rank only, or its tokens count twice. What an open
        step holds is left out. The state is made of tensors, strings, numbers, lists and dicts, which
        ``torch.load(weights_only=True)`` reads.
        """
        size = self._registry.num_groups
        return {
            "version": _STATE_VERSION,
            "num_values": self._num_values,
            "grow": self._registry.grow,
            "channels": [list(key) for key in self._registry.keys],
            "totals": {
                mode: {"sums": a.sums[..., :size].clone(), "counts": a.counts[:size].clone()}
                for mode, a in self._totals.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts the sums of a :meth:`state_dict` in the place of all that was gathered; an open step is discarded.

        A growing registry takes in the names of the state. Raises ValueError, and changes nothing, when the state is of
        another vocabulary (other names, another order, another kind of registry), version or number of value rows.
        """
        self._check_state(state)
        keys = [tuple(key) for key in state["channels"]]
        slots = self._registry.add_keys(keys) if self._registry.grow else list(range(len(keys)))
        self.reset()
        for mode, saved in state["totals"].items():
            accumulator = self._accumulator(self._totals, mode)
            index = _to_device(torch.tensor(slots, dtype=torch.int64, device="cpu"), accumulator.sums.device, "slots")
            accumulator.sums.index_copy_(-1, index, saved["sums"].to(accumulator.sums))
            accumulator.counts.index_copy_(0, index, saved["counts"].to(accumulator.counts))

    def _values(self, losses: Tensor | Sequence[Tensor]) -> tuple[Tensor, int]:
        """``[T]`` or ``[K, T]`` detached losses, and the number of rows that the T tokens came in."""
        if not isinstance(losses, Tensor):
            if self._num_values == 1 or not isinstance(losses, list | tuple):
                raise TypeError(f"losses must be a Tensor, but is a {type(losses).__name__}")
            losses = torch.stack([row.detach() for row in losses])
        losses = losses.detach()
        lead = ()
        if self._num_values > 1:
            if losses.dim() < 2 or losses.shape[0] != self._num_values:
                raise ValueError(f"losses must be [{self._num_values}, ...] (num_values), but are {_shape(losses)}")
            lead = losses.shape[:1]
        shape = losses.shape[len(lead) :]
        if len(shape) not in (1, 2):
            raise ValueError(f"losses must be [T], [1, T] or [B, S], but are {_shape(losses)}")
        self._adopt_device(losses.device)
        return losses.reshape(*lead, shape.numel()), 1 if len(shape) == 1 else shape[0]

    def _adopt_device(self, device: torch.device) -> None:
        if self._device is None or (self._device.type == device.type and self._device.index is None):
            self._device = device
        elif self._device != device:
            raise ValueError(f"losses must be on the tracker's device {self._device}, but are on {device}")

    def _offsets_of_rows(self, rows: int, num_tokens: int, device: torch.device) -> Tensor:
        """``[rows + 1]`` offsets of equal rows; kept, since batches tend to have one shape."""
        shape = (rows, num_tokens)
        if self._row_offsets is None or self._row_offsets[0] != shape:
            offsets = torch.arange(rows + 1, dtype=torch.int64, device=device) * (num_tokens // max(rows, 1))
            self._row_offsets = (shape, offsets)
        return self._row_offsets[1]

    def _ids(self, ids: Tensor | Iterable[object], num_segments: int) -> Tensor:
        """``[num_segments]`` ids, padded with -1, where they came from or on the host."""
        if not isinstance(ids, Tensor):
            if ids is None or isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
                raise TypeError(f"ids must be an integer Tensor or a list of channel names, but is {ids!r}")
            names = list(ids)
            _check_ids(len(names), num_segments)
            return self._registry.encode(names, length=num_segments)
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids must be int32 or int64, but are {ids.dtype}")
        ids = _flat(ids)
        _check_ids(ids.numel(), num_segments)
        if ids.numel() == num_segments:
            return ids
        return torch.nn.functional.pad(ids, (0, num_segments - ids.numel()), value=-1)

    def _capacity(self) -> int:
        """Slots to hold. A growing registry gets room to spare, so that a new name rarely moves the sums."""
        groups = self._registry.num_groups
        return max(8, 1 << (groups - 1).bit_length()) if self._registry.grow else groups

    def _accumulator(self, accumulators: dict[str, _Accumulator], mode: str) -> _Accumulator:
        accumulator = accumulators.get(mode)
        if accumulator is None:
            _check_mode(mode)
            accumulator = accumulators[mode] = _Accumulator(self._num_values, self._capacity(), self.device)
            self._device = accumulator.counts.device  # "cuda" has become one of the devices
        elif accumulator.counts.numel() < self._registry.num_groups:
            accumulator.resize(self._capacity())
        return accumulator

    def _payload(self, mode: str, unseen: int) -> Tensor:
        """``[K * G + G + 1]`` float64: sums, counts and the counter of unseen names, by shared slot.

        One dtype makes it one all_reduce; float64 holds counts exactly up to 2^53 (9e15 tokens).
        """
        rows, groups = self._num_values, len(self._vocabulary.names)
        payload = torch.zeros((rows + 1) * groups + 1, dtype=torch.float64, device=self.device)
        accumulator = self._totals.get(mode)
        if accumulator is not None and groups:
            index = self._vocabulary.index(payload.device)[: accumulator.counts.numel()]
            table = payload[:-1].view(rows + 1, groups)
            table[:rows].index_copy_(1, index, accumulator.sums.view(rows, -1)[:, : index.numel()])
            table[rows:].index_copy_(1, index, accumulator.counts[None, : index.numel()].double())
        if unseen:
            payload[-1] = unseen
        return payload

    def _stats(self, values: list[float]) -> dict[str, ChannelStat]:
        names = self._vocabulary.names
        groups, rows = len(names), self._num_values
        stats = {}
        for slot, name in enumerate(names):
            count = int(values[rows * groups + slot])
            if count:
                sums = tuple(values[row * groups + slot] for row in range(rows))
                means = tuple(value / count for value in sums)
                stats[name] = ChannelStat(sums[0], count, means[0]) if rows == 1 else ChannelStat(sums, count, means)
        return stats

    def _check_state(self, state: dict[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise ValueError(f"the state has version {state.get('version')!r}, but {_STATE_VERSION} is wanted")
        missing = [key for key in ("num_values", "grow", "channels", "totals") if key not in state]
        if missing:
            raise ValueError(f"the state lacks {', '.join(missing)}")
        if state["num_values"] != self._num_values:
            raise ValueError(f"the state has num_values={state['num_values']}, but the tracker {self._num_values}")
        kinds = ("fixed", "growing")
        if state["grow"] != self._registry.grow:
            raise ValueError(
                f"the state belongs to a {kinds[state['grow']]} ChannelRegistry, but the tracker has a "
                f"{kinds[self._registry.grow]} one"
            )
        saved = [text for _, text in state["channels"]]
        if not self._registry.grow and saved != list(self._registry.names):
            raise ValueError(
                f"the state belongs to another vocabulary: it has the channels {', '.join(saved)}, "
                f"but the tracker {', '.join(self._registry.names)}"
            )
        size = len(saved)
        shapes = {"sums": (size,) if self._num_values == 1 else (self._num_values, size), "counts": (size,)}
        for mode, totals in state["totals"].items():
            for name, shape in shapes.items():
                found = totals.get(name)
                if not isinstance(found, Tensor) or found.shape != shape:
                    what = f"has shape {list(found.shape)}" if isinstance(found, Tensor) else f"is {found!r}"
                    raise ValueError(f"{name} of mode {mode!r} in the state must have shape {list(shape)}, but {what}")
            if totals["counts"].is_floating_point() or (totals["counts"] < 0).any():
                raise ValueError(f"counts of mode {mode!r} in the state must be integers of at least 0")


class _Accumulator:
    """float64 sums ([G] or [K, G]) and int64 counts ([G]) of one mode.

    They are made outside inference mode even when an evaluation loop is in it: they outlive it, and torch lets nobody
    change an inference tensor later.
    """

    @torch.inference_mode(False)
    def __init__(self, num_values: int, capacity: int, device: torch.device) -> None:
        shape = (capacity,) if num_values == 1 else (num_values, capacity)
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.counts = torch.zeros(capacity, dtype=torch.int64, device=device)

    @torch.inference_mode(False)
    def resize(self, capacity: int) -> None:
        more = (0, capacity - self.counts.numel())
        self.sums = torch.nn.functional.pad(self.sums, more)
        self.counts = torch.nn.functional.pad(self.counts, more)

    def zero_(self) -> None:
        self.sums.zero_()
        self.counts.zero_()

    def add_(self, other: _Accumulator) -> None:
        size = other.counts.numel()
        self.sums[..., :size] += other.sums
        self.counts[:size] += other.counts


def _offsets(cu_seqlens: Tensor | Sequence[int]) -> Tensor:
    if not isinstance(cu_seqlens, Tensor):
        cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int64, device="cpu")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens must be int32 or int64, but are {cu_seqlens.dtype}")
    cu_seqlens = _flat(cu_seqlens)
    if cu_seqlens.numel() == 0:
        raise ValueError("cu_seqlens must have at least one element (number of segments + 1), but is empty")
    return cu_seqlens


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _to_device(tensor: Tensor, device: torch.device, argument: str) -> Tensor:
    """``tensor`` on ``device``; from the host without blocking, which takes pinned memory."""
    if tensor.device == device:
        return tensor
    if tensor.device.type != "cpu":
        raise ValueError(f"{argument} must be on the host or on {device}, but is on {tensor.device}")
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _check_ids(given: int, wanted: int) -> None:
    if given > wanted:
        raise ValueError(f"there are {given} channel ids for {wanted} segments")


def _check_mode(mode: str) -> None:
    if not isinstance(mode, str):
        raise TypeError(f"mode must be a string such as 'train' or 'eval', but is {mode!r}")


def _shape(tensor: Tensor) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"
