# SPDX-License-Identifier: Apache-2.0
"""Loads the operators' library, or says in one error what is wrong and what mends it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parent
REBUILD = "in segscatter's source tree, pip install --no-build-isolation --force-reinstall --no-deps ."


def library_path() -> Path:
    return PACKAGE / "lib" / "libsegscatter.so"


def build_info() -> dict[str, str]:
    """What the library was built from: versions of segscatter, torch, CUDA and compiler, and CUDA architectures."""
    try:
        return json.loads((PACKAGE / "_build.json").read_text())
    except FileNotFoundError:
        raise ImportError(f"segscatter is not built: {PACKAGE} has no _build.json. Build it: {REBUILD}") from None


def check_versions(info: dict[str, str]) -> None:
    """C++ classes of torch change between versions, so the library must be loaded by the torch it was built against."""
    built, running = info["torch"], torch.__version__
    if built.split("+")[0] != running.split("+")[0]:
        raise ImportError(
            f"segscatter was built against torch {built}, but this is torch {running}. Rebuild it: {REBUILD}"
        )
    if info["cuda"] and info["cuda"].split(".")[0] != (torch.version.cuda or "none").split(".")[0]:
        raise ImportError(
            f"segscatter was built with CUDA {info['cuda']}, but this torch is for CUDA "
            f"{torch.version.cuda or '(none)'}. Rebuild it: {REBUILD}"
        )


def load() -> dict[str, str]:
    """Registers the operators with torch; returns :func:`build_info`. Raises ImportError that names the fix."""
    info = build_info()
    check_versions(info)
    path = library_path()
    if not path.exists():
        raise ImportError(f"segscatter's library is missing: {path}. Rebuild it: {REBUILD}")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"segscatter's library cannot be loaded (built against torch {info['torch']}, CUDA "
            f"{info['cuda'] or 'none'}; running torch {torch.__version__}). Rebuild it: {REBUILD}\n{error}"
        ) from error
    return info
