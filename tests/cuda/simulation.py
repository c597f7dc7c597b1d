# SPDX-License-Identifier: Apache-2.0
"""What the simulator saw: launches, copies, allocations, and which PTX instructions ran.

`cudasim` is importable only under the launcher of that name; on a real GPU the tests that need it are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

try:
    import cudasim
except ImportError:
    cudasim = None

KERNEL = re.compile(r"\d+([a-z_]+)I")  # the last name before the template arguments, in segscatter::core::cuda


def kernel_name(mangled: str) -> str:
    """``reduce_partials`` of ``_ZN10segscatter4core4cuda15reduce_partialsILb1E...``; other names stay as they are."""
    prefix = "_ZN10segscatter4core4cuda"
    match = KERNEL.match(mangled.removeprefix(prefix)) if mangled.startswith(prefix) else None
    return match[1] if match else mangled


@dataclass
class Record:
    """The calls of the CUDA runtime in a ``with record() as r`` block, available at its end."""

    launches: list[dict] = field(default_factory=list)
    copies: list[dict] = field(default_factory=list)
    fills: list[dict] = field(default_factory=list)
    syncs: list[dict] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)  # bytes

    @property
    def kernels(self) -> list[str]:
        return [kernel_name(launch["name"]) for launch in self.launches]

    @property
    def streams(self) -> set:
        return {launch["stream"] for launch in self.launches}

    def __enter__(self) -> Record:
        cudasim.reset()
        return self

    def __exit__(self, *error) -> None:
        self.launches = cudasim.log("launch")
        self.copies = cudasim.log("memcpy")
        self.fills = cudasim.log("memset")
        self.syncs = cudasim.log("sync")
        self.allocated = [entry["bytes"] for entry in cudasim.log("malloc")]

    def check_nothing_but_kernels(self) -> None:
        assert not self.copies, self.copies
        assert not self.fills, self.fills
        assert not self.syncs, self.syncs


def save_coverage(folder: Path) -> None:
    """Writes which instructions of which kernels ran in this process: one file, to be merged by coverage.py.

    Kernels of several PTX targets with the same instructions are the same kernel there.
    """
    kernels = {}
    for (_, name), module in cudasim._mods.items():
        kernel = getattr(module, "kernels", {}).get(name)
        if kernel is None or not name.startswith("_ZN10segscatter"):
            continue
        text = [f"{'@' if i.guard else ''}{i.text}" for i in kernel.instrs]
        hit = [] if kernel.hit is None else [int(h) for h in kernel.hit]
        digest = hashlib.sha256("\n".join(text).encode()).hexdigest()
        entry = kernels.setdefault(f"{name} {digest}", {"target": module.target, "text": text, "hit": [0] * len(text)})
        if hit:  # the same kernel may lie in several modules
            entry["hit"] = [a | b for a, b in zip(entry["hit"], hit, strict=True)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.getpid()}.json").write_text(json.dumps(kernels))
