# SPDX-License-Identifier: Apache-2.0
"""What a reader needs to judge the numbers, and nothing that names a machine or a path."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import segscatter
import torch

PEER_PACKAGES = ("numpy", "torch-scatter", "fbgemm-gpu-cpu", "fbgemm-gpu")


def environment(device: str, quick: bool) -> dict[str, object]:
    """Machine and versions."""
    info = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "segscatter": segscatter.build_info(),
        "peers": _versions(),
        "quick": quick,
    }
    if device == "cuda":
        info["gpu"] = torch.cuda.get_device_name()
        info["cuda"] = torch.version.cuda
    return info


def _versions() -> dict[str, str]:
    found = {}
    for package in PEER_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model\t")]
    return f"{len(names)} x {names[0]}, model {models[0]}" if names and models else platform.processor()


def watch_others() -> Callable[[], float | None]:
    """Starts to watch; the result tells the share of the processors that other processes have had since then.

    None where the system does not count it.
    """
    begin, busy, own = time.perf_counter(), _busy_seconds(), sum(os.times()[:4])

    def share() -> float | None:
        if busy is None:
            return None
        others = _busy_seconds() - busy - (sum(os.times()[:4]) - own)
        return round(max(0.0, others) / (time.perf_counter() - begin) / (os.cpu_count() or 1), 3)

    return share


def _busy_seconds() -> float | None:
    """Of all processors together, since boot."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _wait, interrupts, soft_interrupts, stolen = map(int, fields)
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
