# SPDX-License-Identifier: Apache-2.0
"""What `import segscatter` says when the library and the torch that runs do not fit."""

from __future__ import annotations

import pytest
import torch
from segscatter import _load

BUILT = {"version": "0", "torch": "2.9.0+cu130", "cuda": "13.0", "cuda_architectures": "9.0"}


def check(monkeypatch: pytest.MonkeyPatch, torch_version: str, cuda: str | None) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    _load.check_versions(BUILT)


def test_other_cuda_major(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ImportError, match=r"built with CUDA 13.0, but this torch is for CUDA 12.8. Rebuild it: .*pip install"
    ):
        check(monkeypatch, "2.9.0+cu128", "12.8")


def test_cpu_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"built with CUDA 13.0, but this torch is for CUDA \(none\)"):
        check(monkeypatch, "2.9.0+cpu", None)


def test_other_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"built against torch 2.9.0\+cu130, but this is torch 2.10.0"):
        check(monkeypatch, "2.10.0+cu130", "13.0")


def test_other_minor_version_of_cuda_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    check(monkeypatch, "2.9.0+cu132", "13.2")
