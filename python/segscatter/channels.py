# SPDX-License-Identifier: Apache-2.0
"""The channel vocabulary: which name is which group id.

Importing this module is cheap and starts nothing, so collators in dataloader workers may use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import numbers
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

try:
    from . import _C
except ImportError:  # the native encoder only saves time
    _C = None

__all__ = ["ChannelKey", "ChannelRegistry", "display_names", "vocabulary_hash"]

ChannelKey = tuple[str, str]
"""Identity of a channel: (type name, text). It travels between ranks as two strings, and keeps 1 and "1" apart."""


class ChannelRegistry:
    """An ordered vocabulary of channel names; a name's position (slot) is its group id.

    names: the channels, in order. They are compared after ``str()``.
    none: name of the reserved slot for segments without a channel (``None``).
    other: name of the reserved slot for names outside the vocabulary.
    grow: False: the vocabulary is fixed: slots are ``[*names, none, other]``, the same on every rank. True: a name seen
        for the first time gets the next free slot of this process, and :class:`~segscatter.ChannelLossTracker` merges
        the vocabularies of the ranks; there are no reserved slots (``None`` is a channel like any other, shown as
        ``none``), and 1 and "1" stay two channels.

    Registries are equal when they give the same ids to the same names, and can be pickled.

    Raises TypeError when ``names`` is a string or holds None; ValueError when two names, or a name and a reserved slot,
    are the same after ``str()`` (fixed) or the same name comes twice (growing).
    """

    def __init__(
        self, names: Iterable[object] = (), *, none: str = "None", other: str = "other", grow: bool = False
    ) -> None:
        if isinstance(names, str | bytes):
            raise TypeError(f"names must be an iterable of names, but is the single string {names!r}")
        names = list(names)
        self._grow = bool(grow)
        self._none = str(none)
        self._other = str(other)
        self._unseen = 0
        self._warned = False
        if not grow:
            self._check_fixed(names)
            names += [self._none, self._other]
        self._keys: list[ChannelKey] = []
        self._build_lookup()
        for name in names:
            key = self._key(name)
            if key in self._slots:
                raise ValueError(f"names holds {name!r} twice, at positions {self._slots[key]} and {len(self._keys)}")
            self._append(key)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], **options: Any) -> ChannelRegistry:
        """Reads the names from a UTF-8 file: a JSON list, or one name a line (blank lines and outer spaces dropped).

        options: as in the constructor. Raises ValueError for JSON that is not a list, and as the constructor does.
        """
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        if os.fsdecode(path).endswith(".json") or text.lstrip().startswith(('["', "[\n", "[]")):
            try:
                names = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{os.fspath(path)} is not a valid JSON list: {error}") from error
            if not isinstance(names, list):
                raise ValueError(
                    f"{os.fspath(path)} must hold a JSON list of names, but holds a {type(names).__name__}"
                )
        else:
            names = [line.strip() for line in text.split("\n") if line.strip()]
        return cls(names, **options)

    @classmethod
    def from_dataset(cls, dataset: Any, key: str = "channel", **options: Any) -> ChannelRegistry:
        """Collects the names that a dataset holds, sorted, so that the order of its rows does not matter.

        dataset: a Hugging Face ``Dataset`` (or anything with its ``column_names`` and ``unique``), a mapping of
            columns, a mapping of splits (``DatasetDict``), or an iterable of rows (mappings), which is read to its end.
            Every rank must pass the same data. None values and rows without the key go to the ``none`` slot.
        key: the column. options: as in the constructor.

        Raises ValueError when the key is nowhere in the dataset, and as the constructor does (1 and "1" collide).
        """
        found = {name_key(value): value for value in _column_values(dataset, key)}
        found.pop(name_key(None), None)
        return cls([found[k] for k in sorted(found, key=lambda k: (k[1], k[0]))], **options)

    def encode(self, names: Iterable[object], *, length: int | None = None) -> Tensor:
        """Turns the channel names of a batch's segments into group ids.

        names: one for every segment; None where a segment has no channel.
        length: pad the result to this length with -1, the id of segments to be ignored.

        Returns ``[len(names)]`` (or ``[length]``) int32 on the CPU: pinned when CUDA is there, except in dataloader
        workers, which must not touch CUDA (``DataLoader(pin_memory=True)`` pins their batches).

        Raises TypeError for a string in place of a list, ValueError when there are more names than ``length``, and
        RuntimeError when a growing registry is used in a dataloader worker, whose slots no other process would know.
        """
        if isinstance(names, str | bytes):
            raise TypeError(f"names must be an iterable of names, but is the single string {names!r}")
        if not isinstance(names, list):
            names = list(names)
        if length is not None and length < len(names):
            raise ValueError(f"there are {len(names)} channel names for {length} segments")
        in_worker = get_worker_info() is not None
        if self._grow and in_worker:
            raise RuntimeError(
                "a growing ChannelRegistry cannot encode in a dataloader worker: the slots it hands out there are "
                "unknown to the training process. Hand the names themselves to ChannelLossTracker.update, or use a "
                "fixed registry"
            )
        count = len(names)
        # On the CPU whatever torch.set_default_device says: the encoder writes to the address.
        size = count if length is None else length
        ids = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=_may_pin(in_worker))
        if len(ids) > count:
            ids[count:].fill_(-1)
        if self._table is None:
            ids[:count] = torch.tensor([self._resolve(name) for name in names], dtype=torch.int32, device="cpu")
            return ids
        unresolved, unseen = self._table.encode(
            names, ids.data_ptr(), self._none_slot, self._unseen_slot, self._int_prefix
        )
        self._unseen += unseen
        if unresolved:
            slots = [self._resolve(names[i]) for i in unresolved]
            ids[torch.tensor(unresolved, device="cpu")] = torch.tensor(slots, dtype=torch.int32, device="cpu")
        return ids

    @property
    def names(self) -> tuple[str, ...]:
        """The name of every slot; no two are the same (a growing registry writes the second of "1" and 1 "1 (int)")."""
        names = self._names
        if len(names) != len(self._keys):
            names = self._names = display_names(self.keys, self._none)
        return names

    @property
    def num_groups(self) -> int:
        """G: the number of slots, the reserved ones included."""
        return len(self._keys)

    @property
    def grow(self) -> bool:
        """Whether unseen names get slots of their own."""
        return self._grow

    @property
    def none(self) -> str:
        """The name under which segments without a channel are shown."""
        return self._none

    @property
    def other(self) -> str:
        """The name under which names outside a fixed vocabulary are counted."""
        return self._other

    @property
    def keys(self) -> tuple[ChannelKey, ...]:
        """The identity of every slot, for exchange between ranks and in checkpoints."""
        return tuple(self._keys)

    @property
    def unseen(self) -> int:
        """How many names this process has encoded that a fixed vocabulary does not hold."""
        return self._unseen

    @property
    def stable_hash(self) -> str:
        """32 hexadecimal digits over the ordered vocabulary: the same on every machine and in every Python run."""
        return vocabulary_hash(self._keys, self._grow)

    def add_keys(self, keys: Iterable[ChannelKey]) -> list[int]:
        """The slots of ``keys`` in a growing registry, which takes in those it does not hold yet."""
        if not self._grow:
            raise RuntimeError("a fixed ChannelRegistry takes no new names")
        return [self._slots[key] if key in self._slots else self._append(key) for key in map(tuple, keys)]

    def __len__(self) -> int:
        return len(self._keys)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelRegistry):
            return NotImplemented
        return (self._grow, self._keys, self._none) == (other._grow, other._keys, other._none)

    __hash__ = None  # a growing registry changes

    def __repr__(self) -> str:
        kind = "growing" if self._grow else "fixed"
        return f"<ChannelRegistry, {kind}, {len(self)} slots: {', '.join(self.names)}>"

    def __getstate__(self) -> dict[str, Any]:
        return {"grow": self._grow, "none": self._none, "other": self._other, "keys": self._keys}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._grow, self._none, self._other = state["grow"], state["none"], state["other"]
        self._unseen = 0
        self._warned = False
        self._keys = []
        self._build_lookup()
        for key in state["keys"]:
            self._append(key)

    def _check_fixed(self, names: Sequence[object]) -> None:
        if self._none == self._other:
            raise ValueError(f"none and other must differ, but both are {self._none!r}")
        seen: dict[str, object] = {}
        for name in names:
            if name is None:
                raise TypeError(f"names must not hold None: segments without a channel have the slot {self._none!r}")
            text = str(name)
            for argument, reserved in (("none", self._none), ("other", self._other)):
                if text == reserved:
                    raise ValueError(
                        f"the channel {name!r} collides with the reserved slot {argument}={reserved!r}; "
                        f"choose another name for the slot"
                    )
            if text in seen:
                raise ValueError(f"the channels {seen[text]!r} and {name!r} are both called {text!r} after str()")
            seen[text] = name

    def _build_lookup(self) -> None:
        self._lock = threading.Lock()
        self._slots: dict[ChannelKey, int] = {}
        self._texts: set[str] = set()
        self._names: tuple[str, ...] = ()
        self._table = _C.NameTable() if _C is not None else None
        self._int_prefix = b"\xff" if self._grow else b""  # a byte that no string has in UTF-8
        self._none_slot = -1
        self._unseen_slot = -1  # a growing registry has none: names that the table lacks come back unresolved

    def _key(self, name: object) -> ChannelKey:
        if self._grow:
            return name_key(name)
        return ("str", self._none if name is None else str(name))

    def _append(self, key: ChannelKey) -> int:
        """The slot of a key that was not found a moment ago; another thread may have been faster."""
        with self._lock:
            if key not in self._slots:
                self._add_slot(key)
            return self._slots[key]

    def _add_slot(self, key: ChannelKey) -> None:
        slot = len(self._keys)
        kind, text = key
        if text in self._texts and not self._warned:
            self._warned = True
            warnings.warn(
                f"channels of different types are written alike, as {text!r}; they are kept apart, and shown with "
                f"their type",
                stacklevel=5,
            )
        self._texts.add(text)
        self._keys.append(key)
        self._slots[key] = slot
        if kind in ("str", "int") and self._table is not None:
            prefix = self._int_prefix if kind == "int" else b""
            with contextlib.suppress(UnicodeEncodeError):  # lone surrogates: left to _resolve
                self._table.insert(prefix + text.encode(), slot)
        if self._grow:
            if key == name_key(None):
                self._none_slot = slot
        elif text == self._none:
            self._none_slot = slot
        elif text == self._other:
            self._unseen_slot = slot

    def _resolve(self, name: object) -> int:
        key = self._key(name)
        slot = self._slots.get(key)
        if slot is not None:
            return slot
        if self._grow:
            return self._append(key)
        self._unseen += 1
        return self._unseen_slot


def name_key(name: object) -> ChannelKey:
    """The identity of a name in a growing vocabulary. All integer types are one type, so are all string types."""
    if isinstance(name, str):
        return ("str", str(name))
    if isinstance(name, numbers.Integral) and not isinstance(name, bool):
        return ("int", str(int(name)))
    return (type(name).__name__, str(name))


def display_names(keys: Sequence[ChannelKey], none: str) -> tuple[str, ...]:
    """One distinct name for every key: its text (``none`` for None), with its type where a string has that text."""
    taken = {text for kind, text in keys if kind == "str"}
    names = []
    for kind, text in keys:
        name = none if kind == "NoneType" else text
        if kind != "str":
            while name in taken:
                name = f"{name} ({kind})"
            taken.add(name)
        names.append(name)
    return tuple(names)


def vocabulary_hash(keys: Iterable[ChannelKey], grow: bool) -> str:
    """32 hexadecimal digits over the ordered keys; lengths go in too, so that no two lists read the same."""
    digest = hashlib.sha256(b"segscatter growing" if grow else b"segscatter fixed")
    for key in keys:
        for part in key:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.hexdigest()[:32]


def _column_values(dataset: Any, key: str) -> Iterable[object]:
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and hasattr(dataset, "unique"):
        if key not in columns:
            raise ValueError(f"the dataset has no column {key!r}; its columns are {', '.join(map(repr, columns))}")
        return dataset.unique(key)
    if isinstance(dataset, Mapping):
        if key in dataset:
            return dataset[key]
        if not dataset or not all(_is_split(value) for value in dataset.values()):
            raise ValueError(f"the dataset has no column {key!r}; its columns are {', '.join(map(repr, dataset))}")
        return [value for split in dataset.values() for value in _column_values(split, key)]
    values, found = [], False
    for row in dataset:
        if not isinstance(row, Mapping):
            raise ValueError(f"the rows of the dataset must be mappings, but one is a {type(row).__name__}")
        found = found or key in row
        values.append(row.get(key))
    if values and not found:
        raise ValueError(f"no row of the dataset has the key {key!r}")
    return values


def _is_split(value: Any) -> bool:
    return hasattr(value, "column_names") or (isinstance(value, list) and all(isinstance(v, Mapping) for v in value))


def _may_pin(in_worker: bool) -> bool:
    """Whether pinned memory is to be had without starting CUDA in a process that only loads data."""
    if in_worker:
        return False
    if torch.cuda.is_initialized():
        return True
    return multiprocessing.parent_process() is None and torch.cuda.is_available()
