# SPDX-License-Identifier: Apache-2.0
"""How ranks agree on channels: every decision rests on an all-reduced value, so no rank waits for another in vain."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .channels import ChannelKey, ChannelRegistry, display_names, vocabulary_hash

__all__ = ["Group", "SharedVocabulary", "communication_device", "resolve_group"]

Group: TypeAlias = "dist.ProcessGroup | Callable[[], dist.ProcessGroup | None] | None"


def resolve_group(group: Group) -> dist.ProcessGroup | None:
    """The process group to reduce over, or None when there is nothing to reduce with.

    group: a process group, a callable giving one (called now, so the group may be made later than its user), or None
        for the default group. Nothing to reduce with: torch.distributed is not initialised, the group has one rank, or
        this rank is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if callable(group):
        group = group()
    if group is None:
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_world_size(group) <= 1:
        return None
    return group


def communication_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """``device`` where the group's backend can reduce there, else the first kind of device where it can."""
    backends = dist.distributed_c10d.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    kinds = [entry.split(":")[0] for entry in backends.split(",")]
    return device if device.type in kinds else torch.device(kinds[0])


class SharedVocabulary:
    """The channels of a tracker in an order that all ranks of its group share.

    With a fixed registry that is the registry's own order, which a group checks once. A growing registry keeps its
    local slots, so that ids encoded earlier stay valid, and :meth:`index` maps them to the shared ones.
    """

    def __init__(self, registry: ChannelRegistry, num_values: int) -> None:
        self._registry = registry
        self._num_values = num_values
        self._checked: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups with our fixed vocabulary
        self._keys: list[ChannelKey] = []
        self._local_size = 0  # how much of the registry self._keys covers
        self._names: tuple[str, ...] = ()
        self._index: Tensor | None = None
        self._header: tuple[list[int], bytes] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """A distinct name for every shared slot, the same on all ranks."""
        return self._names

    def index(self, device: torch.device) -> Tensor:
        """``[registry.num_groups]`` int64 at the time of :meth:`agree`: the shared slots of the registry's slots."""
        if self._index is None or self._index.device != device:
            position = {key: slot for slot, key in enumerate(self._keys)}
            slots = [position[key] for key in self._registry.keys[: self._local_size]]
            self._index = torch.tensor(slots, dtype=torch.int64, device="cpu").to(device)
        return self._index

    def agree(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Brings the shared slots up to date.

        Collective: one all_reduce of a few integers (with a fixed registry: only until it has succeeded once in this
        group), and one all_gather of the names when that shows a difference.

        group: None for this process alone. device: where the group can communicate.

        Raises ValueError, the same on every rank, when fixed vocabularies differ, fixed meets growing, or the trackers
        do not have the same number of value rows.
        """
        local = self._registry.keys  # a snapshot: other threads may be encoding
        if len(local) != self._local_size or self._header is None:
            self._local_size = len(local)
            self._adopt([*self._keys, *_missing(local, self._keys)])
        if group is None or (not self._registry.grow and group in self._checked):
            return
        self._compare(group, device)
        self._checked.add(group)

    def _adopt(self, keys: list[ChannelKey]) -> None:
        self._keys = keys
        self._names = display_names(keys, self._registry.none)
        self._index = None
        names = json.dumps(keys).encode()
        digest = int(vocabulary_hash(keys, self._registry.grow), 16)
        self._header = ([self._registry.grow, self._num_values, len(keys), len(names), *_words(digest)], names)

    def _compare(self, group: dist.ProcessGroup, device: torch.device) -> None:
        header, names = self._header
        low, high = min_max(header, group, device)
        if low == high:
            return
        if low[0] != high[0]:
            raise ValueError("some ranks have a fixed ChannelRegistry and some a growing one; all need the same kind")
        if low[1] != high[1]:
            raise ValueError(f"num_values must be the same on all ranks, but goes from {low[1]} to {high[1]}")
        texts = _all_gather_text(names, high[3], group, device)
        vocabularies = [[tuple(key) for key in json.loads(text)] for text in texts]
        if not self._registry.grow:
            raise ValueError(_describe_mismatch(vocabularies))
        merged: list[ChannelKey] = []
        for vocabulary in vocabularies:
            merged += _missing(vocabulary, merged)
        self._adopt(merged)


def min_max(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> tuple[list[int], list[int]]:
    """The smallest and the largest of every value over the ranks, by one all_reduce; ``|values| < 2**63``."""
    both = torch.tensor([*values, *(-v for v in values)], dtype=torch.int64, device="cpu").to(device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    both = both.tolist()
    return [-v for v in both[len(values) :]], both[: len(values)]


def _all_gather_text(text: bytes, length: int, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """The JSON texts of all ranks, in rank order. They are padded with spaces to ``length``, that of the longest."""
    mine = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8).to(device)
    texts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, mine, group=group)
    return [bytes(row) for row in torch.stack(texts).tolist()]


def _missing(keys: Iterable[ChannelKey], known: Iterable[ChannelKey]) -> list[ChannelKey]:
    """The keys that are not known, in order."""
    known = set(known)
    return [key for key in keys if key not in known]


def _words(digest: int) -> list[int]:
    """A 128-bit number as words that an int64 holds together with their negatives."""
    return [digest >> shift & (1 << 43) - 1 for shift in (0, 43, 86)]


def _describe_mismatch(ranks: list[list[ChannelKey]]) -> str:
    first = ranks[0]
    rank = next(rank for rank, keys in enumerate(ranks) if keys != first)
    other = ranks[rank]
    slot = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other)))

    def at(keys: list[ChannelKey]) -> str:
        return repr(keys[slot][1]) if slot < len(keys) else "missing"

    return (
        f"the channel vocabularies of the ranks differ: slot {slot} is {at(first)} on rank 0 ({len(first)} slots) and "
        f"{at(other)} on rank {rank} ({len(other)} slots) of the group. Every rank must build its ChannelRegistry from "
        f"the same names in the same order"
    )
