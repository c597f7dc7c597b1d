# SPDX-License-Identifier: Apache-2.0
"""Counts what costs: operators and collectives that reach the dispatcher, and reads of tensor contents by Python."""

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {"item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}


class Operators(TorchDispatchMode):
    """Records calls at the dispatcher, as (name, positional arguments, keyword arguments)."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or the first use imports the compiler, in every process

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket._qualified_op_name, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def count(self, name):
        return sum(called == name for called, _, _ in self.calls)

    @property
    def collectives(self):
        """Names such as "allreduce", in order."""
        return [name.removeprefix("c10d::").rstrip("_") for name, _, _ in self.calls if name.startswith("c10d::")]


class HostReads(TorchFunctionMode):
    """Counts the calls by which Python sees a tensor's contents."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") in _READS
        return func(*args, **(kwargs or {}))


class Count:
    """A with block that counts both; afterwards ``collectives`` and ``reads``."""

    def __enter__(self):
        self._reads, self._operators = HostReads(), Operators()
        self._reads.__enter__()
        self._operators.__enter__()
        return self

    def __exit__(self, *error):
        self._operators.__exit__(*error)
        self._reads.__exit__(*error)
        self.collectives = self._operators.collectives
        self.reads = self._reads.count + self._operators.count("aten::_local_scalar_dense")
