# SPDX-License-Identifier: Apache-2.0
"""Counts what would stall a GPU: collectives, and reads of device data by the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose output the host reads, or whose output's size depends on device data.
_READING_OPS = {"_local_scalar_dense", "nonzero", "masked_select", "unique_dim", "_unique2"}


@dataclass
class Counts:
    """collectives: calls of c10d operators. scalar_reads: .item(), bool(), int(), slicing by a tensor, boolean
    indexing. copies: device-to-host copies of whole tensors (.cpu(), .tolist())."""

    collectives: int = 0
    scalar_reads: int = 0
    copies: int = 0

    @property
    def host_reads(self) -> int:
        return self.scalar_reads + self.copies


class _Dispatcher(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func.overloadpacket
        namespace, _, name = str(packet).partition(".")
        if namespace == "c10d":
            self.counts.collectives += 1
        elif name in _READING_OPS:
            self.counts.scalar_reads += 1
        elif name in ("index", "index_put_"):
            indices = args[1]
            self.counts.scalar_reads += any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        elif str(func) == "aten.repeat_interleave.Tensor":
            self.counts.scalar_reads += kwargs is None or kwargs.get("output_size") is None
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """On the CPU, where the tests run, a copy to the host is no operator; the method call is what can be counted."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.counts.copies += getattr(func, "__name__", "") in ("cpu", "tolist")
        return func(*args, **(kwargs or {}))


class count_stalls:  # noqa: N801  (used as a context manager)
    """``with count_stalls() as counts: ...``"""

    def __enter__(self) -> Counts:
        self.counts = Counts()
        self._modes = [_Methods(self.counts), _Dispatcher(self.counts)]
        for mode in self._modes:
            mode.__enter__()
        return self.counts

    def __exit__(self, *error) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
