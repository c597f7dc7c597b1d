# SPDX-License-Identifier: Apache-2.0
"""Compiled floors and baselines, built on first use. Raises SkippedError where a compiler or a header is missing."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from ..methods import SkippedError

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "benchmarks-native" / torch.__version__


@functools.cache
def _build(source: str) -> str:
    """Loads it into ``torch.ops.segscatter_benchmark``, from BUILD if it is there. Returns what went wrong, or ""."""
    from torch.utils.cpp_extension import load

    name = f"segscatter_benchmark_{Path(source).stem}"
    folder = BUILD / name
    if not folder.exists():
        print(f"compiling {source}", file=sys.stderr, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        load(
            name,
            [str(HERE / source)],
            extra_cflags=["-O3"],
            extra_cuda_cflags=["-O3"],
            build_directory=str(folder),
            is_python_module=False,
        )
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def _operators(source: str):
    if wrong := _build(source):
        raise SkippedError(f"{source} did not build: {wrong}")
    return torch.ops.segscatter_benchmark


def operators():
    """``nothing``."""
    return _operators("nothing.cpp")


def cuda_operators():
    """``empty_kernel`` and ``segmented_reduce``; nvcc builds them."""
    return _operators("floors.cu")


@functools.cache
def read_bytes() -> Callable[[int, int], int]:
    """``read_bytes(address, bytes)``. Its OpenMP is the one that torch has loaded."""
    with tempfile.TemporaryDirectory(prefix="segscatter-benchmark-") as folder:
        library = Path(folder) / "read.so"
        command = ["g++", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", HERE / "read.cpp", "-o", library]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SkippedError(f"g++ did not build read.cpp: {type(error).__name__}") from error
        function = ctypes.CDLL(str(library)).read_bytes  # loaded, so the file may go
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_uint64
    return function
